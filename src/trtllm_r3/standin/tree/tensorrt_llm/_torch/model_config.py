"""What the model is built from: the checkpoint's config and the engine's choices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..mapping import Mapping
from .device import get_device
from .pretrained_config import PretrainedConfig, load_pretrained_config, resolve_dtype

_ASSIGNABLE = ("_frozen", "extra_attrs", "pretrained_config", "quant_config")


class KvCacheSpec(NamedTuple):
    """Shape of the KV cache of a model: every layer has the same."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(kw_only=True)
class ModelConfig:
    """Configuration of a model. Frozen once `from_pretrained` has made it, but for `extra_attrs`.

    `moe_max_num_tokens` defaults to `max_num_tokens` times the attention-DP size, which is one MoE chunk.
    """

    pretrained_config: Any = None
    mapping: Mapping = field(default_factory=Mapping)
    quant_config: Any = None
    skip_create_weights_in_init: bool = False
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    moe_max_num_tokens: int | None = None
    moe_load_balancer: Any = None
    attn_backend: str = "TRTLLM"
    moe_backend: str = "CUTLASS"
    use_cuda_graph: bool = False
    extra_attrs: dict[str, Any] = field(default_factory=dict, repr=False, init=False)
    _frozen: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.moe_max_num_tokens is None:
            self.moe_max_num_tokens = self.max_num_tokens * self.mapping.dp_size
        if self.moe_max_num_tokens < 1:
            raise ValueError(f"moe_max_num_tokens={self.moe_max_num_tokens} must be positive")
        if self.quant_config is not None:
            raise ValueError("quant_config is not supported")

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False) and name not in _ASSIGNABLE:
            raise AttributeError(f"cannot modify ModelConfig.{name}: the instance is frozen")
        super().__setattr__(name, value)

    @classmethod
    def from_pretrained(
        cls,
        checkpoint_dir: str | Path,
        trust_remote_code: bool = False,
        *,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> ModelConfig:
        """Configuration of a Hugging Face checkpoint; `kwargs` are fields of this class.

        `dtype` "auto" is the checkpoint's, but float32 on CPU. ValueError for what can't be run.
        """
        config = load_pretrained_config(checkpoint_dir)
        config.torch_dtype = config.dtype = _choose_dtype(dtype, config)
        made = cls(pretrained_config=config, **kwargs)
        made._frozen = True
        return made

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        dtype: torch.dtype = self.pretrained_config.torch_dtype
        return dtype

    @contextmanager
    def weights_deferred(self) -> Iterator[None]:
        """Within, modules allocate no weights."""
        before, frozen = self.skip_create_weights_in_init, self._frozen
        self._assign_deferral(True, frozen)
        try:
            yield
        finally:
            self._assign_deferral(before, frozen)

    def _assign_deferral(self, value: bool, frozen: bool) -> None:
        self._frozen = False
        self.skip_create_weights_in_init = value
        self._frozen = frozen

    def kv_cache_spec(self) -> KvCacheSpec:
        """(num_layers, num_kv_heads, head_dim, dtype) of the cache that the model's layers expect.

        Latent attention caches expanded heads: keys and values of all heads, the narrower one padded.
        """
        config = self.pretrained_config
        if config.architectures[0] == "OracleMoeForCausalLM":
            return KvCacheSpec(config.num_hidden_layers, 1, 2, torch.float32)
        if config.model_type == "deepseek_v3":
            width = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
            return KvCacheSpec(config.num_hidden_layers, config.num_attention_heads, width, self.torch_dtype)
        return KvCacheSpec(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, self.torch_dtype
        )


def _choose_dtype(wanted: str, config: PretrainedConfig) -> torch.dtype:
    if wanted != "auto":
        return resolve_dtype(wanted)
    return torch.float32 if get_device().type == "cpu" else config.torch_dtype
