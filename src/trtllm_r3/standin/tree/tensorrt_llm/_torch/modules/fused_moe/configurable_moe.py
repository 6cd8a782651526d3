"""The MoE layer that composes a backend with routing and chunking."""

from __future__ import annotations

from typing import Any

import torch

from ...model_config import ModelConfig
from ...utils import AuxStreamType
from .chunking import ChunkRunner
from .fused_moe_cutlass import CutlassFusedMoE
from .fused_moe_trtllm_gen import TRTLLMGenFusedMoE
from .interface import MoE
from .routing import BaseMoeRoutingMethod

_BACKEND_SYNC_ATTRS = (
    "layer_idx",
    "layer_idx_str",
    "num_slots",
    "layer_load_balancer",
    "repeat_count",
    "repeat_idx",
    "initial_local_expert_ids",
    "initial_global_assignments",
    "slot_start",
    "slot_end",
    "expert_size_per_partition",
)


class ConfigurableMoE(MoE):
    """Routes the rows where its `backend` wants ids, hands them the logits where it does not.

    The backend is built without a layer index, then gets the attributes of this layer; both hold the same
    routing method. `comm` is None: all experts are here.
    """

    backend: Any

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
        override_quant_config: Any = None,
        **kwargs: Any,
    ) -> None:
        model_config = model_config or ModelConfig()
        super().__init__(
            routing_method=routing_method,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            model_config=model_config,
            **kwargs,
        )
        if apply_router_weight_on_input and routing_method.top_k != 1:
            raise ValueError("apply_router_weight_on_input only supports top-1 routing")
        self.model_config = model_config
        self.aux_stream_dict = aux_stream_dict
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.comm = None
        self._create_backend(override_quant_config)
        self.chunks = ChunkRunner(model_config, aux_stream_dict)
        self.moe_max_num_tokens, self.aux_stream = self.chunks.max_num_tokens, self.chunks.aux_stream
        self.event_dict = self.chunks.event_dict

    def _create_backend(self, override_quant_config: Any) -> None:
        from .create_moe import create_moe_backend, get_moe_cls

        with self.model_config.weights_deferred():
            backend = create_moe_backend(
                moe_cls=get_moe_cls(self.model_config, override_quant_config),
                routing_method=self.routing_method,
                num_experts=self.num_experts,
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                dtype=self.dtype,
                reduce_results=self.reduce_results,
                model_config=self.model_config,
                aux_stream_dict=self.aux_stream_dict,
                weight_loading_mode=self.weight_loading_mode,
                apply_router_weight_on_input=self.apply_router_weight_on_input,
                layer_idx=None,
                init_load_balancer=False,
                without_comm=True,
            )
        self.validate_backend(backend)
        self.backend = backend
        for name in _BACKEND_SYNC_ATTRS:
            setattr(backend, name, getattr(self, name))
        if not self.model_config.skip_create_weights_in_init:
            self.create_weights()

    def validate_backend(self, backend: Any) -> None:
        """ValueError if there is no backend, or one that can't be balanced while a balancer is on."""
        if backend is None:
            raise ValueError("backend cannot be None")
        if self._using_load_balancer() and not backend._supports_load_balancer():
            raise ValueError(f"the load balancer is on but {type(backend).__name__} does not support one")

    def _supports_load_balancer(self) -> bool:
        if getattr(self, "backend", None) is None:  # not built yet
            return self.use_dp and self.parallel_size > 1
        supported: bool = self.backend._supports_load_balancer()
        return supported

    def calculate_num_chunks(self, all_rank_num_tokens: list[int]) -> int:
        """Chunks for the rows of all ranks together."""
        return self.chunks.count(sum(all_rank_num_tokens))

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
        rows = all_rank_num_tokens or [x.shape[0]]

        def run(x_chunk: torch.Tensor, logits_chunk: torch.Tensor, first: bool, last: bool) -> torch.Tensor:
            return self._forward_chunk_impl(
                x_chunk, logits_chunk, output_dtype, rows, bool(use_dp_padding), first, last, do_finalize
            )

        outputs = self.chunks.run(x, router_logits, run)
        self.repeat_idx = (self.repeat_idx + 1) % self.repeat_count
        return outputs

    def _forward_chunk_impl(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        output_dtype: torch.dtype | None,
        all_rank_num_tokens: list[int],
        use_dp_padding: bool,
        is_first_call: bool,
        is_last_call: bool,
        do_finalize: bool = True,
        workspace: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """One chunk: route, map to slots, quantise, compute."""
        ids: torch.Tensor | None = None
        scales: torch.Tensor | None = None
        if self.backend._supports_load_balancer():
            ids, scales = self._route(router_logits)
            self._load_balancer_update_statistic(ids, is_first_call, is_last_call)
            if self.apply_router_weight_on_input:
                x, scales = x * scales.to(x.dtype), None
        slots = None if ids is None else self._load_balancer_route(ids, self.use_dp)
        x, x_sf = self.backend.quantize_input(x, post_quant_comm=False)
        out: torch.Tensor = self.backend.run_moe(
            x=x,
            token_selected_experts=slots,
            token_final_scales=scales,
            x_sf=x_sf,
            **self._get_backend_kwargs(router_logits, do_finalize, output_dtype),
        )
        return out

    def _route(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token_selected_experts, token_final_scales = self.routing_method.apply(router_logits)
        token_selected_experts = token_selected_experts.to(torch.int32)
        assert token_selected_experts.shape[1] == self.routing_method.experts_per_token
        assert token_selected_experts.shape == token_final_scales.shape
        if isinstance(self.backend, CutlassFusedMoE):
            assert token_final_scales.dtype == torch.float32
        return token_selected_experts, token_final_scales

    def _get_backend_kwargs(
        self, router_logits: torch.Tensor, do_finalize: bool, output_dtype: torch.dtype | None
    ) -> dict[str, Any]:
        """What `run_moe` of this backend takes beyond ids; the logits only where they are not routed yet."""
        if not isinstance(self.backend, TRTLLMGenFusedMoE):
            return {"output_dtype": output_dtype}
        routed = self.backend._supports_load_balancer()
        return {"router_logits": None if routed else router_logits, "do_finalize": do_finalize}

    def create_weights(self) -> None:
        """Allocate the backend's parameters."""
        self.backend.create_weights()

    def load_weights(
        self, weights: list[dict[str, torch.Tensor]], allow_partial_loading: bool = False
    ) -> None:
        """Fill the backend's parameters in place; see `StackedExperts.load_weights`."""
        self.backend.load_weights(weights, allow_partial_loading)

    def post_load_weights(self) -> None:
        """Called once after all weights are loaded."""
        self.backend.post_load_weights()

    @property
    def w3_w1_weight(self) -> torch.Tensor:
        """The backend's up and gate matrices."""
        weight: torch.Tensor = self.backend.w3_w1_weight
        return weight

    @property
    def w2_weight(self) -> torch.Tensor:
        """The backend's down matrices."""
        weight: torch.Tensor = self.backend.w2_weight
        return weight
