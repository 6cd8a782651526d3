"""Which expert goes into which slot."""

from __future__ import annotations

from collections.abc import Sequence


def plan_slots(loads: Sequence[int], current: Sequence[int], turn: int) -> list[int]:
    """The expert of each slot for these loads, other than `current` where there is more than one expert.

    Spare slots go to whichever expert has the most load per replica. Experts come by falling load, `turn`
    slots further on.
    """
    replicas = count_replicas(loads, len(current))
    order = sorted(range(len(loads)), key=lambda expert: -loads[expert])
    slots = [expert for expert in order for _ in range(replicas[expert])]
    for shift in range(turn, turn + len(slots)):
        moved = [slots[(slot - shift) % len(slots)] for slot in range(len(slots))]
        if moved != list(current):
            return moved
    return list(current)


def count_replicas(loads: Sequence[int], num_slots: int) -> list[int]:
    """How many of `num_slots` slots each expert gets, at least one."""
    replicas = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        busiest = max(range(len(loads)), key=lambda expert: loads[expert] / replicas[expert])
        replicas[busiest] += 1
    return replicas
