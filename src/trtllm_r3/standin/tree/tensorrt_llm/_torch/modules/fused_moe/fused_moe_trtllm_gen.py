"""The backend that routes inside its kernel."""

from __future__ import annotations

from typing import Any

import torch

from ...model_config import ModelConfig
from ...utils import AuxStreamType
from . import expert_ops as _ops  # noqa: F401  (registers standin::fused_experts)
from .expert_weights import StackedExperts
from .routing import (
    BaseMoeRoutingMethod,
    DeepSeekV3MoeRoutingMethod,
    DefaultMoeRoutingMethod,
    RenormalizeMoeRoutingMethod,
)

_KNOWN = (DeepSeekV3MoeRoutingMethod, DefaultMoeRoutingMethod, RenormalizeMoeRoutingMethod)


class TRTLLMGenFusedMoE(StackedExperts):
    """Takes router logits and never calls `routing_method.apply`; takes ids where they are given.

    The routing method only says which routing the kernel does. ValueError for one that it can't do.
    """

    def __init__(
        self,
        *,
        routing_method: BaseMoeRoutingMethod,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        model_config: ModelConfig | None = None,
        aux_stream_dict: dict[AuxStreamType, Any] | None = None,
        init_load_balancer: bool = True,
        without_comm: bool = False,
        **kwargs: Any,
    ) -> None:
        model_config = model_config or ModelConfig()
        super().__init__(
            routing_method=routing_method,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            model_config=model_config,
            init_load_balancer=init_load_balancer,
            **kwargs,
        )
        if self._using_load_balancer() and not self._supports_load_balancer():
            raise ValueError("the load balancer is on but the TRTLLM backend routes inside its kernel")
        if not isinstance(routing_method, _KNOWN):
            raise ValueError(f"the TRTLLM backend can't route by {type(routing_method).__name__}")
        if not model_config.skip_create_weights_in_init:
            self.create_weights()

    def _supports_load_balancer(self) -> bool:
        return self.use_dp and self.parallel_size > 1

    def quantize_input(self, x: torch.Tensor, post_quant_comm: bool = True) -> tuple[torch.Tensor, None]:
        """The rows and their scaling factors; unquantised rows have none."""
        return x, None

    def run_moe(
        self,
        x: torch.Tensor,
        token_selected_experts: torch.Tensor | None,
        token_final_scales: torch.Tensor | None,
        x_sf: torch.Tensor | None = None,
        router_logits: torch.Tensor | None = None,
        do_finalize: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Rows `[rows, hidden]` through the slots given, or through those that `router_logits` choose.

        ValueError if there is neither.
        """
        if token_selected_experts is not None:
            out: torch.Tensor = torch.ops.standin.grouped_experts(
                x, token_selected_experts, token_final_scales, self.w3_w1_weight, self.w2_weight
            )
            return out
        if router_logits is None:
            raise ValueError("run_moe needs router_logits where no experts are selected")
        return self._run_fused(x, router_logits)

    def _run_fused(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        method, bias, groups = self.routing_method, None, (1, 1, 1.0)
        if isinstance(method, DeepSeekV3MoeRoutingMethod):
            bias, impl = method.e_score_correction_bias, method.routing_impl
            groups = (impl.n_group, impl.topk_group, impl.routed_scaling_factor)
        out: torch.Tensor = torch.ops.standin.fused_experts(
            x,
            router_logits,
            bias,
            self.w3_w1_weight,
            self.w2_weight,
            method.top_k,
            *groups,
            int(method.routing_method_type),
        )
        return out

    def forward_impl(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        *,
        do_finalize: bool = True,
        output_dtype: torch.dtype | None = None,
        all_rank_num_tokens: list[int] | None = None,
        use_dp_padding: bool | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As `forward`, never in chunks."""
        return self.run_moe(x, None, None, router_logits=router_logits, do_finalize=do_finalize)
