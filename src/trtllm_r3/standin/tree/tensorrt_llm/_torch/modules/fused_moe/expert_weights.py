"""Parameters of a layer's experts, and how they are filled."""

from __future__ import annotations

import torch
from torch import nn

from ..linear import empty_parameter
from .interface import MoE, MoEWeightLoadingMode


class StackedExperts(MoE):
    """A layer whose experts are two stacks.

    `w3_w1_weight` is `[E, 2 * inner, hidden]`, up before gate, `w2_weight` `[E, hidden, inner]`.
    """

    w3_w1_weight: nn.Parameter
    w2_weight: nn.Parameter
    _weights_created = False

    def create_weights(self) -> None:
        """Allocate the parameters, once."""
        if self._weights_created:
            return
        experts, hidden, inner = self.expert_size_per_partition, self.hidden_size, self.intermediate_size
        self.w3_w1_weight = empty_parameter(experts, 2 * inner, hidden, dtype=self.dtype)
        self.w2_weight = empty_parameter(experts, hidden, inner, dtype=self.dtype)
        self._weights_created = True

    def load_weights(
        self, weights: list[dict[str, torch.Tensor]], allow_partial_loading: bool = False
    ) -> None:
        """Fill the parameters in place.

        Keys are `{e}.w1.weight` (gate), `{e}.w3.weight` (up), `{e}.w2.weight` (down), or in the fused mode
        `gate_up_proj` `[E, 2 * inner, hidden]`, gate first, and `down_proj`. ValueError for a shape that
        does not fit, and for a lacking key unless `allow_partial_loading`.
        """
        assert len(weights) == 1
        targets = self._targets()
        lacking = sorted(targets.keys() - weights[0].keys())
        unknown = sorted(weights[0].keys() - targets.keys())
        if unknown or (lacking and not allow_partial_loading):
            raise ValueError(
                f"experts of layer {self.layer_idx}: lacking {lacking[:4]}, unknown {unknown[:4]}"
            )
        for key, value in weights[0].items():
            targets[key](value)

    def _targets(self) -> dict[str, _Filler]:
        inner, up_gate, down = self.intermediate_size, self.w3_w1_weight.data, self.w2_weight.data
        if self.weight_loading_mode is MoEWeightLoadingMode.FUSED_GATE_UP_PROJ:
            return {
                "gate_up_proj": _Filler(up_gate[:, inner:], up_gate[:, :inner]),
                "down_proj": _Filler(down),
            }
        targets = {}
        for expert in range(self.expert_size_per_partition):
            targets[f"{expert}.w3.weight"] = _Filler(up_gate[expert, :inner])
            targets[f"{expert}.w1.weight"] = _Filler(up_gate[expert, inner:])
            targets[f"{expert}.w2.weight"] = _Filler(down[expert])
        return targets


class _Filler:
    """Copies a matrix, or the two halves of one, into place."""

    def __init__(self, *targets: torch.Tensor) -> None:
        self.targets = targets

    def __call__(self, value: torch.Tensor) -> None:
        for target, part in zip(self.targets, value.chunk(len(self.targets), -2), strict=True):
            if target.shape != part.shape:
                raise ValueError(
                    f"expert weight of shape {tuple(part.shape)}, expected {tuple(target.shape)}"
                )
            target.copy_(part)
