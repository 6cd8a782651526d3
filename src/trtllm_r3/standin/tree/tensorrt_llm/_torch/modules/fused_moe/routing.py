"""Routing methods: from router logits to expert ids and scales. Each MoE layer has an object of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from enum import IntEnum

import torch
from torch import nn

from . import routing_ops as _ops

MAX_FUSED_EXPERTS, MAX_FUSED_TOP_K = 128, 8


class RoutingMethodType(IntEnum):
    """Kinds of routing, with the numbers that kernels know them by."""

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    MiniMax2 = 5
    Unspecified = 6


class BaseMoeRoutingMethod(nn.Module):
    """A routing method. Its `apply` has nothing to do with that of `nn.Module`, which it hides."""

    top_k: int

    @abstractmethod
    def apply(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Logits `[rows, experts]` to (ids int32, scales), each `[rows, experts_per_token]`."""

    def get_experts_per_token(self) -> int:
        """Number of experts per token."""
        return self.top_k

    @property
    def experts_per_token(self) -> int:
        """Number of experts per token."""
        return self.get_experts_per_token()

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """Kind of routing, for a kernel that routes by itself."""
        return RoutingMethodType.Unspecified


class DefaultMoeRoutingMethod(BaseMoeRoutingMethod):
    """Softmax over all experts, then the largest."""

    def __init__(
        self, top_k: int, output_dtype: torch.dtype = torch.float32, force_enable_pytorch_op: bool = False
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.output_dtype = output_dtype
        self.force_enable_pytorch_op = force_enable_pytorch_op

    def apply_pytorch(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `apply`, by plain tensor operations."""
        values, ids = _ops.default_routing(router_logits, self.top_k, self.output_dtype)
        return ids, values

    def apply(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Logits `[rows, experts]` to (ids int32, scales), each `[rows, experts_per_token]`."""
        if self.force_enable_pytorch_op or not _fits_kernel(router_logits, self.top_k):
            return self.apply_pytorch(router_logits)
        ids, scales = torch.ops.trtllm.default_moe_routing_op(router_logits, self.top_k, self.output_dtype)
        return ids, scales

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """Kind of routing."""
        return RoutingMethodType.Default


class RenormalizeMoeRoutingMethod(BaseMoeRoutingMethod):
    """The largest logits, then softmax over these."""

    def __init__(
        self, top_k: int, force_enable_pytorch_op: bool = False, output_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.output_dtype = output_dtype
        self.force_enable_pytorch_op = force_enable_pytorch_op

    def apply_pytorch(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `apply`, by plain tensor operations."""
        values, ids = _ops.renorm_routing(router_logits, self.top_k, self.output_dtype)
        return ids, values

    def apply(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Logits `[rows, experts]` to (ids int32, scales), each `[rows, experts_per_token]`."""
        if self.force_enable_pytorch_op or not _fits_kernel(router_logits, self.top_k):
            return self.apply_pytorch(router_logits)
        ids, scales = torch.ops.trtllm.renorm_moe_routing_op(router_logits, self.top_k, self.output_dtype)
        return ids, scales

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """Kind of routing."""
        return RoutingMethodType.Renormalize


class RenormalizeNaiveMoeRoutingMethod(RenormalizeMoeRoutingMethod):
    """As Renormalize, never by the kernel."""

    def apply(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Logits `[rows, experts]` to (ids int32, scales), each `[rows, experts_per_token]`."""
        return self.apply_pytorch(router_logits)

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """Kind of routing."""
        return RoutingMethodType.RenormalizeNaive


class Deepseekv3RoutingImpl:
    """Grouped sigmoid routing; `is_fused` turns off for shapes that the kernel does not take."""

    def __init__(
        self, top_k: int, n_group: int, topk_group: int, routed_scaling_factor: float, is_fused: bool = True
    ) -> None:
        self.top_k = top_k
        self.n_group = n_group
        self.topk_group = topk_group
        self.routed_scaling_factor = routed_scaling_factor
        self.is_fused = is_fused

    def noaux_tc(
        self, logits: torch.Tensor, e_score_correction_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[rows, experts]` to (scales, ids): the scales come first here."""
        per_group = logits.shape[-1] // self.n_group
        if self.top_k > MAX_FUSED_TOP_K or per_group > 32 or per_group * self.topk_group > 128:
            self.is_fused = False
        kernel = torch.ops.trtllm.noaux_tc_op if self.is_fused else _ops.noaux_tc
        values, ids = kernel(
            logits,
            e_score_correction_bias,
            self.n_group,
            self.topk_group,
            self.top_k,
            self.routed_scaling_factor,
        )
        return values, ids

    def apply(
        self, logits: torch.Tensor, e_score_correction_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[rows, experts]` to (ids int32, scales float32), each `[rows, top_k]`."""
        values, ids = self.noaux_tc(logits, e_score_correction_bias)
        return ids.to(torch.int32), values.to(torch.float32)


class DeepSeekV3MoeRoutingMethod(BaseMoeRoutingMethod):
    """DeepSeek-V3 routing; the bias is fetched at each call, for it lives in the gate."""

    def __init__(
        self,
        top_k: int,
        n_group: int,
        topk_group: int,
        routed_scaling_factor: float,
        callable_e_score_correction_bias: Callable[[], torch.Tensor],
        is_fused: bool = True,
    ) -> None:
        super().__init__()
        self.routing_impl = Deepseekv3RoutingImpl(top_k, n_group, topk_group, routed_scaling_factor, is_fused)
        assert callable(callable_e_score_correction_bias)
        self.callable_e_score_correction_bias = callable_e_score_correction_bias

    def apply(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Logits `[rows, experts]` to (ids int32, scales float32), each `[rows, experts_per_token]`."""
        return self.routing_impl.apply(logits, self.e_score_correction_bias)

    @property
    def e_score_correction_bias(self) -> torch.Tensor:
        """Bias of the choice, float32 `[experts]`."""
        return self.callable_e_score_correction_bias()

    @property
    def top_k(self) -> int:  # type: ignore[override]
        """Number of experts per token."""
        return self.routing_impl.top_k

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """Kind of routing."""
        return RoutingMethodType.DeepSeekV3


def _fits_kernel(router_logits: torch.Tensor, top_k: int) -> bool:
    return router_logits.shape[-1] <= MAX_FUSED_EXPERTS and top_k <= MAX_FUSED_TOP_K
