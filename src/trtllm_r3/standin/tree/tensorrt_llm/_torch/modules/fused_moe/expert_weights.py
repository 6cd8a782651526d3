"""Parameters of a layer's experts, and how they are filled."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..linear import empty_parameter
from .interface import MoE, MoEWeightLoadingMode


class StackedExperts(MoE):
    """A layer whose experts are two stacks.

    `w3_w1_weight` is `[S, 2 * inner, hidden]`, up before gate, `w2_weight` `[S, hidden, inner]`; there are as
    many slots S as experts E unless a load balancer is on, whose placement says which expert a slot holds.
    """

    w3_w1_weight: nn.Parameter
    w2_weight: nn.Parameter
    _weights_created = False

    def create_weights(self) -> None:
        """Allocate the parameters, once."""
        if self._weights_created:
            return
        slots, hidden, inner = self.expert_size_per_partition, self.hidden_size, self.intermediate_size
        self.w3_w1_weight = empty_parameter(slots, 2 * inner, hidden, dtype=self.dtype)
        self.w2_weight = empty_parameter(slots, hidden, inner, dtype=self.dtype)
        self._weights_created = True
        if self.layer_load_balancer is not None:
            for name in ("w3_w1_weight", "w2_weight"):
                for slot, part in enumerate(getattr(self, name).data):
                    self.layer_load_balancer.register_weight_slot(slot, name, part)

    def load_weights(
        self, weights: list[dict[str, torch.Tensor]], allow_partial_loading: bool = False
    ) -> None:
        """Fill the parameters in place, each slot with what its expert gets.

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

    def _targets(self) -> dict[str, Callable[[torch.Tensor], None]]:
        inner, up_gate, down = self.intermediate_size, self.w3_w1_weight.data, self.w2_weight.data
        experts = self.slot_experts
        if self.weight_loading_mode is MoEWeightLoadingMode.FUSED_GATE_UP_PROJ:
            return {
                "gate_up_proj": _Filler(up_gate[:, inner:], up_gate[:, :inner], experts=experts),
                "down_proj": _Filler(down, experts=experts),
            }
        targets: dict[str, Callable[[torch.Tensor], None]] = {}
        for expert in range(self.num_experts):
            held = [slot for slot, holds in enumerate(experts) if holds == expert]
            targets[f"{expert}.w3.weight"] = _Replicas(up_gate[slot, :inner] for slot in held)
            targets[f"{expert}.w1.weight"] = _Replicas(up_gate[slot, inner:] for slot in held)
            targets[f"{expert}.w2.weight"] = _Replicas(down[slot] for slot in held)
        return targets


class _Filler:
    """Copies the matrices of all experts, or the halves of each, to the slots that hold them."""

    def __init__(self, *targets: torch.Tensor, experts: list[int]) -> None:
        self.targets, self.experts = targets, experts

    def __call__(self, value: torch.Tensor) -> None:
        experts = max(self.experts) + 1
        for target, part in zip(self.targets, value.chunk(len(self.targets), -2), strict=True):
            _check_shape(part, (experts, *target.shape[1:]))
            target.copy_(part[self.experts])


class _Replicas:
    """Copies the matrix of one expert to each of the slots that hold it."""

    def __init__(self, targets: Iterable[torch.Tensor]) -> None:
        self.targets = list(targets)

    def __call__(self, value: torch.Tensor) -> None:
        for target in self.targets:
            _check_shape(value, tuple(target.shape))
            target.copy_(value)


def _check_shape(value: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"expert weight of shape {tuple(value.shape)}, expected {expected}")
