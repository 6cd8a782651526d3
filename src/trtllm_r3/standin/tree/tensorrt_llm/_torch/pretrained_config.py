"""A checkpoint's config.json, read without transformers and brought to one form."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "sliding_window": None,
    "default_theta": 10000.0,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "max_position_embeddings": 32768,
    },
    "mixtral": {"rms_norm_eps": 1e-5, "default_theta": 1e6, "max_position_embeddings": 131072},
    "deepseek_v3": {
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class PretrainedConfig(SimpleNamespace):
    """The fields of config.json as attributes, defaults of the architecture filled in.

    Always there: `architectures`, `model_type`, `torch_dtype` and `dtype` (torch.dtype), `rope_parameters`
    (with `rope_type` and `rope_theta`), `rope_theta`, `rope_scaling`, and for MoE models `num_experts`.
    """

    architectures: list[str]
    model_type: str
    torch_dtype: torch.dtype
    rope_parameters: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"config.json of {self.__dict__.get('model_type')!r} has no {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict."""
        return dict(self.__dict__)


def load_pretrained_config(checkpoint_dir: str | Path) -> PretrainedConfig:
    """Read `checkpoint_dir/config.json`.

    ValueError if there is none, or it names no architecture, a quantisation or a dtype that is unknown.
    """
    path = Path(checkpoint_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"no config.json in {checkpoint_dir}: expected a Hugging Face checkpoint directory")
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not raw.get("architectures"):
        raise ValueError(f"{path} names no architectures")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise ValueError(f"quantization_config ({method}) is not supported, only unquantised checkpoints")
    return _normalised(raw)


def resolve_dtype(name: str | torch.dtype | None) -> torch.dtype:
    """The torch dtype called `name`, float32 for None. ValueError for what a model can't be computed in."""
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if name is not None and name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not supported, only {', '.join(_DTYPES)}")
    return _DTYPES[name or "float32"]


def _normalised(raw: dict[str, Any]) -> PretrainedConfig:
    fields = {
        **_COMMON,
        **_DEFAULTS.get(raw.get("model_type", ""), {}),
        **{key: value for key, value in raw.items() if value is not None or key not in _COMMON},
    }
    fields.setdefault("model_type", "")
    fields["dtype"] = fields["torch_dtype"] = resolve_dtype(raw.get("dtype") or raw.get("torch_dtype"))
    _set_rope(fields)
    _set_heads(fields)
    experts = next((fields[key] for key in _EXPERTS if fields.get(key) is not None), None)
    if experts is not None:
        fields.update(dict.fromkeys(_EXPERTS, experts))
    return PretrainedConfig(**fields)


def _set_rope(fields: dict[str, Any]) -> None:
    """`rope_parameters` from either form: one dict, or `rope_theta` beside `rope_scaling`."""
    given = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError("rope_parameters that differ by layer type are not supported")
    kind = given.pop("type", None)
    given.setdefault("rope_type", kind or "default")
    given.setdefault("rope_theta", fields.get("rope_theta") or fields["default_theta"])
    part = given.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={part} is not supported, only 1.0")
    if given["rope_type"] in ("yarn", "llama3"):
        given.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    fields["rope_parameters"], fields["rope_theta"] = given, given["rope_theta"]
    fields["rope_scaling"] = None if given["rope_type"] == "default" else given


def _set_heads(fields: dict[str, Any]) -> None:
    heads = fields.get("num_attention_heads")
    if not heads:
        return
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = heads
    if fields.get("head_dim") is None:
        fields["head_dim"] = fields["hidden_size"] // heads
