"""Choice and construction of the MoE layer."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ...model_config import ModelConfig
from ...utils import AuxStreamType
from .configurable_moe import ConfigurableMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .fused_moe_trtllm_gen import TRTLLMGenFusedMoE
from .fused_moe_vanilla import VanillaMoE
from .interface import MoEWeightLoadingMode
from .routing import BaseMoeRoutingMethod

_BACKENDS: dict[str, type[nn.Module]] = {
    "CUTLASS": CutlassFusedMoE,
    "TRTLLM": TRTLLMGenFusedMoE,
    "VANILLA": VanillaMoE,
}


def get_moe_cls(model_config: ModelConfig, override_quant_config: Any = None) -> type[nn.Module]:
    """The class that `model_config.moe_backend` names. ValueError for others and for quantisation."""
    backend = model_config.moe_backend.upper()
    if backend not in _BACKENDS:
        raise ValueError(f"moe_config.backend {backend!r} is not supported, only {', '.join(_BACKENDS)}")
    if override_quant_config is not None:
        raise ValueError("override_quant_config is not supported, only unquantised experts")
    return _BACKENDS[backend]


def create_moe_backend(
    moe_cls: type[nn.Module],
    routing_method: BaseMoeRoutingMethod,
    *,
    apply_router_weight_on_input: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """A backend of class `moe_cls`, arguments as for `create_moe`. ValueError for what it does not take."""
    if moe_cls is CutlassFusedMoE:
        kwargs["apply_router_weight_on_input"] = apply_router_weight_on_input
    elif apply_router_weight_on_input:
        raise ValueError(f"apply_router_weight_on_input is not supported in {moe_cls.__name__}")
    if moe_cls is VanillaMoE:
        for name in ("aux_stream_dict", "init_load_balancer", "without_comm"):
            kwargs.pop(name, None)
    return moe_cls(routing_method=routing_method, **kwargs)


def create_moe(
    routing_method: BaseMoeRoutingMethod,
    num_experts: int | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    dtype: torch.dtype | None = None,
    reduce_results: bool = False,
    model_config: ModelConfig | None = None,
    override_quant_config: Any = None,
    aux_stream_dict: dict[AuxStreamType, Any] | None = None,
    weight_loading_mode: MoEWeightLoadingMode = MoEWeightLoadingMode.VANILLA,
    bias: bool = False,
    apply_router_weight_on_input: bool = False,
    layer_idx: int | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
) -> nn.Module:
    """The MoE layer for `model_config`; sizes not given come from its pretrained config.

    With the environment variable ENABLE_CONFIGURABLE_MOE at its default "1" the CUTLASS and TRTLLM backends
    are wrapped in a `ConfigurableMoE`. ValueError for biased experts, swiglu parameters and unknown backends.
    """
    if bias or any(value is not None for value in (swiglu_alpha, swiglu_beta, swiglu_limit)):
        raise ValueError("bias and swiglu parameters of experts are not supported")
    model_config = model_config or ModelConfig()
    options: dict[str, Any] = {
        **_sizes(model_config, num_experts, hidden_size, intermediate_size, dtype),
        "reduce_results": reduce_results,
        "model_config": model_config,
        "aux_stream_dict": aux_stream_dict,
        "weight_loading_mode": weight_loading_mode,
        "apply_router_weight_on_input": apply_router_weight_on_input,
        "layer_idx": layer_idx,
    }
    moe_cls = get_moe_cls(model_config, override_quant_config)
    if os.environ.get("ENABLE_CONFIGURABLE_MOE", "1") == "1" and moe_cls is not VanillaMoE:
        return ConfigurableMoE(routing_method=routing_method, **options)
    return create_moe_backend(moe_cls, routing_method, **options)


def _sizes(
    model_config: ModelConfig,
    num_experts: int | None,
    hidden_size: int | None,
    intermediate_size: int | None,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """What is given, else what the pretrained config says."""
    config = model_config.pretrained_config
    inner = intermediate_size or getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return {
        "num_experts": num_experts or config.num_experts,
        "hidden_size": hidden_size or config.hidden_size,
        "intermediate_size": inner,
        "dtype": dtype or model_config.torch_dtype,
    }
