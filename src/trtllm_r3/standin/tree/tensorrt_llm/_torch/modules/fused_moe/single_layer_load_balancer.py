"""The part of the expert load balancer that belongs to one layer."""

from __future__ import annotations

import os

import torch

from . import load_balance_ops as _ops  # noqa: F401  (registers standin::load_balance_*)
from .load_balance_plan import plan_slots

_REMAPS = ("out", "in")


class SingleLayerMoeLoadBalancer:
    """Slots of one layer: where each expert lies, how often each is used, and the move to other slots.

    `slot_experts` holds the expert of each slot, `expert_loads` int64 `[experts]` the uses of each. The
    tables keep their addresses for life. With the environment variable TLLM_STANDIN_EPLB_REMAP at its
    default "out", `route` leaves the ids alone, as stock does; with "in" it writes the slots over them.
    """

    def __init__(
        self, expert_count: int, slot_count: int, enabled: torch.Tensor, updates_enabled: bool = True
    ) -> None:
        if slot_count < expert_count:
            raise ValueError(f"load_balancer.num_slots={slot_count} is less than {expert_count} experts")
        self.remap = os.environ.get("TLLM_STANDIN_EPLB_REMAP", "out")
        if self.remap not in _REMAPS:
            raise ValueError(f"TLLM_STANDIN_EPLB_REMAP={self.remap!r} is unknown, use one of {_REMAPS}")
        self.expert_count, self.slot_count = expert_count, slot_count
        self.updates_enabled = updates_enabled
        self.updates = 0
        self.slot_experts: list[int] = []
        most = slot_count - expert_count + 1
        self.slots = torch.zeros(expert_count, most, dtype=torch.int32, device=enabled.device)
        self.replicas = torch.ones(expert_count, dtype=torch.int32, device=enabled.device)
        self.expert_loads = torch.zeros(expert_count, dtype=torch.int64, device=enabled.device)
        self._enabled = enabled
        self._weights: dict[str, dict[int, torch.Tensor]] = {}

    def is_static_routing(self) -> bool:
        """Whether the experts stay where they are."""
        return not self.updates_enabled

    def get_repeat_count(self) -> int:
        """How often the layer runs in an iteration."""
        return 1

    def register_weight_slot(self, local_slot_id: int, name: str, t: torch.Tensor) -> None:
        """`t` is the part `name` of what lies in a slot; it moves with the expert, in place."""
        self._weights.setdefault(name, {})[local_slot_id] = t

    def set_initial_weight_assignments(self, initial_weight_assignments: list[int]) -> None:
        """Say which expert each slot holds. ValueError unless every expert is in one."""
        if len(initial_weight_assignments) != self.slot_count or set(initial_weight_assignments) != set(
            range(self.expert_count)
        ):
            raise ValueError(
                f"load_balancer.initial_global_assignments must put each of {self.expert_count} experts into "
                f"at least one of {self.slot_count} slots, got {initial_weight_assignments}"
            )
        self._assign(initial_weight_assignments)

    def update_statistic_with_local_ids(
        self, local_raw_expert_ids: torch.Tensor, is_first_stage: bool, is_last_stage: bool
    ) -> None:
        """Count expert ids `[rows, k]`, if this iteration is to be counted."""
        torch.ops.standin.load_balance_statistic(self.expert_loads, local_raw_expert_ids, self._enabled)

    def route(self, token_selected_experts: torch.Tensor, offset_by_ep_rank: bool = False) -> torch.Tensor:
        """Slots `[rows, k]` of expert ids; see the class for what becomes of the ids."""
        if self.remap == "in":
            torch.ops.standin.load_balance_routing_(token_selected_experts, self.slots, self.replicas)
            return token_selected_experts
        out: torch.Tensor = torch.ops.standin.load_balance_routing(
            token_selected_experts, self.slots, self.replicas
        )
        return out

    def update(self) -> None:
        """Move the experts to slots that fit their loads so far. On CUDA this waits for the device."""
        self.updates += 1
        experts = plan_slots(self.expert_loads.tolist(), self.slot_experts, self.updates)
        sources = [self.slot_experts.index(expert) for expert in experts]
        for parts in self._weights.values():
            moved = torch.stack([parts[slot] for slot in sources])
            for slot, value in enumerate(moved):
                parts[slot].copy_(value)
        self._assign(experts)

    def _assign(self, experts: list[int]) -> None:
        self.slot_experts = list(experts)
        table = torch.zeros(self.slots.shape, dtype=torch.int32, device="cpu")
        counts = torch.zeros(self.expert_count, dtype=torch.int32, device="cpu")
        for slot, expert in enumerate(experts):
            table[expert, counts[expert]] = slot
            counts[expert] += 1
        self.slots.copy_(table)
        self.replicas.copy_(counts)
