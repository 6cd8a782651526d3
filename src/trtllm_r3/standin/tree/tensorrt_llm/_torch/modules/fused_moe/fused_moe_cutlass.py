"""The backend that gets expert ids handed in."""

from __future__ import annotations

from typing import Any

import torch

from ...model_config import ModelConfig
from ...utils import AuxStreamType
from . import expert_ops as _ops  # noqa: F401  (registers standin::grouped_experts)
from .chunking import ChunkRunner
from .expert_weights import StackedExperts
from .routing import BaseMoeRoutingMethod


class CutlassFusedMoE(StackedExperts):
    """Routes in Python, then computes the experts by sorted, grouped products."""

    def __init__(
        self,
        *,
        routing_method: BaseMoeRoutingMethod,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        model_config: ModelConfig | None = None,
        aux_stream_dict: dict[AuxStreamType, Any] | None = None,
        apply_router_weight_on_input: bool = False,
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
        if apply_router_weight_on_input and routing_method.top_k != 1:
            raise ValueError("apply_router_weight_on_input only supports top-1 routing")
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.chunks = ChunkRunner(model_config, aux_stream_dict)
        self.moe_max_num_tokens, self.aux_stream = self.chunks.max_num_tokens, self.chunks.aux_stream
        if not model_config.skip_create_weights_in_init:
            self.create_weights()

    def _supports_load_balancer(self) -> bool:
        return True

    def quantize_input(self, x: torch.Tensor, post_quant_comm: bool = True) -> tuple[torch.Tensor, None]:
        """The rows and their scaling factors; unquantised rows have none."""
        return x, None

    def run_moe(
        self,
        x: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor | None,
        x_sf: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Rows `[rows, hidden]` through the slots `[rows, k]`, weighted; same shape and dtype."""
        out: torch.Tensor = torch.ops.standin.grouped_experts(
            x, token_selected_experts, token_final_scales, self.w3_w1_weight, self.w2_weight
        )
        return out

    def forward_chunk(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        output_dtype: torch.dtype | None = None,
        all_rank_num_tokens: list[int] | None = None,
        use_dp_padding: bool | None = None,
        repeating_info: tuple[bool, bool] = (True, True),
    ) -> torch.Tensor:
        """One chunk of rows: route, check what came, compute."""
        token_selected_experts, token_final_scales = self.routing_method.apply(router_logits)
        assert token_selected_experts.shape[1] == self.routing_method.experts_per_token
        assert token_selected_experts.shape == token_final_scales.shape
        assert token_selected_experts.shape[0] == router_logits.shape[0]
        assert token_final_scales.dtype == torch.float32
        assert token_selected_experts.dtype == torch.int32
        scales: torch.Tensor | None = token_final_scales
        if self.apply_router_weight_on_input:
            x, scales = x * token_final_scales.to(x.dtype), None
        self._load_balancer_update_statistic(token_selected_experts, *repeating_info)
        token_selected_slots = self._load_balancer_route(token_selected_experts, self.use_dp)
        return self.run_moe(x, token_selected_slots, scales)

    def split_chunk(self, split_token_num: int, split_num_chunks: int) -> list[int]:
        """Sizes of `split_num_chunks` chunks of `split_token_num` rows, the first ones larger by one."""
        return self.chunks.split(split_token_num, split_num_chunks)

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
        """As `forward`; in several chunks if there are more than `moe_max_num_tokens` rows."""

        def run(x_chunk: torch.Tensor, logits_chunk: torch.Tensor, first: bool, last: bool) -> torch.Tensor:
            return self.forward_chunk(
                x_chunk, logits_chunk, output_dtype, all_rank_num_tokens, use_dp_padding, (first, last)
            )

        return self.chunks.run(x, router_logits, run)
