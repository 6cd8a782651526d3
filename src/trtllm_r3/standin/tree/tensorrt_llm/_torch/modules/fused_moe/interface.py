"""The MoE layer that all backends derive from."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from enum import Enum
from typing import Any, final

import torch
from torch import nn

from ...model_config import ModelConfig
from ...utils import is_torch_compiling
from . import custom_op as _op  # noqa: F401  (registers trtllm::moe_custom_op)
from .expert_slots import ExpertSlots
from .routing import BaseMoeRoutingMethod


class MoEWeightLoadingMode(Enum):
    """Form of the experts in the weights given: a matrix for each, or stacks with gate and up together."""

    VANILLA = 0
    FUSED_GATE_UP_PROJ = 1


class MoE(ExpertSlots, nn.Module):
    """Experts of one layer and the way to them.

    `routing_method` turns `router_logits` `[rows, num_experts]` into ids and scales; `forward` is what models
    call, `forward_impl` what backends answer. A layer with a `layer_idx` is known to the model config.
    """

    def __init__(
        self,
        *,
        routing_method: BaseMoeRoutingMethod,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        model_config: ModelConfig | None = None,
        weight_loading_mode: MoEWeightLoadingMode = MoEWeightLoadingMode.VANILLA,
        layer_idx: int | None = None,
        init_load_balancer: bool = True,
    ) -> None:
        super().__init__()
        model_config = model_config or ModelConfig()
        self.routing_method = routing_method
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.dtype = dtype or torch.float32
        self.reduce_results = reduce_results
        self.weight_loading_mode = weight_loading_mode
        self.layer_idx = layer_idx
        self.layer_idx_str = None if layer_idx is None else str(layer_idx)
        self._register_layer(model_config)
        self._set_parallelism(model_config)
        self._init_load_balancer(model_config, init_load_balancer)

    def _register_layer(self, model_config: ModelConfig) -> None:
        self.register_to_config = False
        if self.layer_idx_str is None:
            return
        layers = model_config.extra_attrs.setdefault("moe_layers", {})
        repeats = sum(key.split("_")[0] == self.layer_idx_str for key in layers)
        if repeats:
            self.layer_idx_str = f"{self.layer_idx_str}_{repeats - 1}"
        layers[self.layer_idx_str] = weakref.ref(self)
        self.register_to_config = True

    def _set_parallelism(self, model_config: ModelConfig) -> None:
        self.mapping = model_config.mapping
        self.moe_backend = model_config.moe_backend
        self.use_dp = self.mapping.enable_attention_dp
        self.parallel_size = self.mapping.tp_size
        self.rank = self.mapping.rank
        self.tp_rank, self.tp_size = self.mapping.moe_tp_rank, self.mapping.moe_tp_size
        self.ep_rank, self.ep_size = self.mapping.moe_ep_rank, self.mapping.moe_ep_size
        if self.parallel_size > 1:
            raise ValueError(f"tp_size={self.parallel_size} is not supported, only 1")

    @abstractmethod
    def create_weights(self) -> None:
        """Allocate the parameters."""

    @abstractmethod
    def load_weights(
        self, weights: list[dict[str, torch.Tensor]], allow_partial_loading: bool = False
    ) -> None:
        """Fill the parameters in place from one dict, keyed as `weight_loading_mode` says."""

    def post_load_weights(self) -> None:
        """Called once after all weights are loaded."""

    @abstractmethod
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
        """As `forward`."""

    def forward_fake(self, x: torch.Tensor, router_logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """An empty result, for shape inference."""
        return torch.empty_like(x)

    @final  # type: ignore[misc]
    def forward(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        do_finalize: bool = True,
        output_dtype: torch.dtype | None = None,
        all_rank_num_tokens: list[int] | None = None,
        use_dp_padding: bool | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Rows `x` `[rows, hidden]` through the experts that `router_logits` choose; same shape and dtype.

        ValueError for `do_finalize=False`.
        """
        if not do_finalize:
            raise ValueError("do_finalize=False is not supported")
        if self.register_to_config and is_torch_compiling():
            results: list[torch.Tensor] = torch.ops.trtllm.moe_custom_op(
                self.layer_idx_str,
                x,
                None,
                False,
                router_logits,
                do_finalize,
                output_dtype,
                all_rank_num_tokens,
                use_dp_padding,
            )
            return results[0]
        return self.forward_impl(
            x,
            router_logits,
            do_finalize=do_finalize,
            output_dtype=output_dtype,
            all_rank_num_tokens=all_rank_num_tokens,
            use_dp_padding=use_dp_padding,
            **kwargs,
        )
