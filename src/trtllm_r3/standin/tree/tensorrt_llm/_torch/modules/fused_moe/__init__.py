"""Mixture-of-experts layers."""

from .configurable_moe import ConfigurableMoE
from .create_moe import create_moe, create_moe_backend, get_moe_cls
from .fused_moe_cutlass import CutlassFusedMoE
from .fused_moe_trtllm_gen import TRTLLMGenFusedMoE
from .fused_moe_vanilla import VanillaMoE
from .interface import MoE, MoEWeightLoadingMode
from .routing import (
    BaseMoeRoutingMethod,
    DeepSeekV3MoeRoutingMethod,
    Deepseekv3RoutingImpl,
    DefaultMoeRoutingMethod,
    RenormalizeMoeRoutingMethod,
    RenormalizeNaiveMoeRoutingMethod,
    RoutingMethodType,
)

__all__ = [
    "BaseMoeRoutingMethod",
    "ConfigurableMoE",
    "CutlassFusedMoE",
    "DeepSeekV3MoeRoutingMethod",
    "Deepseekv3RoutingImpl",
    "DefaultMoeRoutingMethod",
    "MoE",
    "MoEWeightLoadingMode",
    "RenormalizeMoeRoutingMethod",
    "RenormalizeNaiveMoeRoutingMethod",
    "RoutingMethodType",
    "TRTLLMGenFusedMoE",
    "VanillaMoE",
    "create_moe",
    "create_moe_backend",
    "get_moe_cls",
]
