"""The plain backend: one feed-forward block per expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...model_config import ModelConfig
from ..gated_mlp import GatedMLP
from .interface import MoEWeightLoadingMode
from .routing import BaseMoeRoutingMethod


class VanillaMoE(nn.ModuleList):
    """A list of experts, each computing all rows; a row keeps what its ids say. No `MoE`, not registered."""

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
    ) -> None:
        super().__init__()
        self.routing_method = routing_method
        self.num_experts = num_experts
        self.layer_idx = layer_idx
        self.mapping = (model_config or ModelConfig()).mapping
        self.use_dp = self.mapping.enable_attention_dp
        self.parallel_size = self.mapping.tp_size
        self.reduce_results = reduce_results
        self.weight_loading_mode = weight_loading_mode
        self.extend(
            GatedMLP(
                hidden_size=hidden_size, intermediate_size=intermediate_size, dtype=dtype or torch.float32
            )
            for _ in range(num_experts)
        )

    def experts(self) -> list[GatedMLP]:
        """The experts in order."""
        return [module for module in self if isinstance(module, GatedMLP)]

    def load_weights(
        self, weights: list[dict[str, torch.Tensor]], allow_partial_loading: bool = False
    ) -> None:
        """Fill the experts in place; keys as for `StackedExperts.load_weights`.

        ValueError for an unknown key or shape, and for a lacking key unless `allow_partial_loading`.
        """
        assert len(weights) == 1
        values = self._per_expert(weights[0])
        for key, target in self._targets().items():
            value = values.pop(key, None)
            if value is None and allow_partial_loading:
                continue
            if value is None or value.shape != target.shape:
                raise ValueError(f"experts of layer {self.layer_idx}: {key} is lacking or of another shape")
            target.copy_(value)
        if values:
            raise ValueError(f"experts of layer {self.layer_idx}: unknown {sorted(values)[:4]}")

    def _targets(self) -> dict[str, torch.Tensor]:
        targets = {}
        for index, expert in enumerate(self.experts()):
            gate, up = expert.gate_up_proj.weight.data.chunk(2)
            targets.update(
                {
                    f"{index}.w1.weight": gate,
                    f"{index}.w3.weight": up,
                    f"{index}.w2.weight": expert.down_proj.weight.data,
                }
            )
        return targets

    def _per_expert(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.weight_loading_mode is MoEWeightLoadingMode.VANILLA:
            return dict(weights)
        split = {}
        if "gate_up_proj" in weights:
            gate, up = weights["gate_up_proj"].chunk(2, 1)
            split.update({f"{e}.w1.weight": part for e, part in enumerate(gate)})
            split.update({f"{e}.w3.weight": part for e, part in enumerate(up)})
        split.update({f"{e}.w2.weight": part for e, part in enumerate(weights.get("down_proj", ()))})
        return split

    def forward(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        all_rank_num_tokens: list[int] | None = None,
        use_dp_padding: bool | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Rows `[rows, hidden]` through the experts that `router_logits` choose; same shape and dtype."""
        token_selected_experts, token_final_scales = self.routing_method.apply(router_logits)
        scales = token_final_scales.new_zeros(x.shape[0], self.num_experts)
        scales.scatter_(1, token_selected_experts.long(), token_final_scales)
        out = torch.zeros_like(x, dtype=scales.dtype)
        for expert, scale in zip(self.experts(), scales.unsqueeze(-1).unbind(1), strict=True):
            out = out + expert(x) * scale
        return out.to(x.dtype)
