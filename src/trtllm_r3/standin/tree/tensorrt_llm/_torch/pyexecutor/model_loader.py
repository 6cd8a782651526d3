"""Builds the model of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ...mapping import Mapping
from ..device import get_device
from ..model_config import ModelConfig
from ..models import AutoModelForCausalLM, load_weights
from ..modules.fused_moe.moe_load_balancer import MoeLoadBalancer, maybe_create_moe_load_balancer


class ModelLoader:
    """Loads models as an engine's options say; `moe_load_balancer` is that of the last one, if it has one."""

    def __init__(self, llm_args: Any, mapping: Mapping, max_num_tokens: int, max_seq_len: int | None) -> None:
        self.llm_args, self.mapping = llm_args, mapping
        self.max_num_tokens, self.max_seq_len = max_num_tokens, max_seq_len
        self.moe_load_balancer: MoeLoadBalancer | None = None

    def load(self, checkpoint_dir: str | Path) -> nn.Module:
        """The model with its weights, on the engine's device. ValueError if it can't be run."""
        config = self._config(checkpoint_dir)
        with get_device(), maybe_create_moe_load_balancer(config, self.mapping) as self.moe_load_balancer:
            model = AutoModelForCausalLM.from_config(config)
        model.load_weights(load_weights(checkpoint_dir))
        return model.eval()

    def reload(self, model: Any, weights: dict[str, Any], allow_partial_loading: bool = False) -> None:
        """Put new weights into a running model, in place."""
        model.load_weights(weights, allow_partial_loading=allow_partial_loading)

    def _config(self, checkpoint_dir: str | Path) -> ModelConfig:
        args = self.llm_args
        return ModelConfig.from_pretrained(
            checkpoint_dir,
            trust_remote_code=args.trust_remote_code,
            dtype=args.dtype,
            mapping=self.mapping,
            moe_backend="CUTLASS" if args.moe_config.backend == "AUTO" else args.moe_config.backend,
            moe_max_num_tokens=args.moe_config.max_num_tokens,
            moe_load_balancer=args.moe_config.load_balancer,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=self.max_seq_len,
            attn_backend=args.attn_backend,
            use_cuda_graph=args.cuda_graph_config is not None,
        )
