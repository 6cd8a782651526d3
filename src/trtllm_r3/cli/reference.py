"""What Hugging Face transformers routes with the same checkpoint, and how captured rows compare with it.

Ids are compared as sets, row by row and layer by layer. A difference is explained only if it is a tie:
the reference's router logits of all ids on which the two disagree lie within `TIE` of that row's range.
After a tie the engine and the reference compute with different experts, so all that follows would differ
as well; the reference is then run again with the engine's choice at that one place, and checked anew.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

TIE = 1e-5
MOST_TIES = 0.001
_ROUNDS = 8

Place = tuple[int, int]  # (row, layer)


@dataclass
class Comparison:
    """Of one sequence, or of many added up. `rows` were captured, `missing` were not."""

    rows: int = 0
    missing: int = 0
    places: int = 0
    ties: set[Place] = field(default_factory=set)
    unexplained: set[Place] = field(default_factory=set)
    num_ties: int = 0
    num_unexplained: int = 0
    differing_rows: int = 0

    def add(self, other: Comparison) -> None:
        """Add another sequence's numbers."""
        self.rows += other.rows
        self.missing += other.missing
        self.places += other.places
        self.num_ties += len(other.ties)
        self.num_unexplained += len(other.unexplained)
        self.differing_rows += len({row for row, _ in other.ties | other.unexplained})

    @property
    def good(self) -> bool:
        """Nothing unexplained, and ties as rare as they have to be."""
        return self.num_unexplained == 0 and self.num_ties <= MOST_TIES * self.places


def compare(ids: torch.Tensor, logits: torch.Tensor) -> Comparison:
    """Captured ids [T, L, K] (-1: missing) against the reference's router logits [T, L, E]."""
    ids = ids.long()
    there = (ids >= 0).all(-1)
    wanted = logits.topk(ids.shape[-1], -1).indices
    same = (ids.sort(-1).values == wanted.sort(-1).values).all(-1)
    captured = there.all(-1)
    found = Comparison(int(captured.sum()), int((~captured).sum()), int(there.sum()))
    for row, layer in torch.nonzero(there & ~same).tolist():
        tie = is_tie(ids[row, layer].tolist(), wanted[row, layer].tolist(), logits[row, layer])
        (found.ties if tie else found.unexplained).add((row, layer))
    return found


def is_tie(ids: Sequence[int], wanted: Sequence[int], logits: torch.Tensor) -> bool:
    """Whether the logits [E] of all ids that only one of the two has are as good as equal.

    Ids that are no set of K experts are never a tie.
    """
    if len(set(ids)) != len(ids) or max(ids) >= len(logits):
        return False
    disputed = logits[sorted(set(ids) ^ set(wanted))]
    span = float(logits.max() - logits.min())
    return float(disputed.max() - disputed.min()) <= TIE * span


class Reference:
    """A checkpoint as transformers runs it: float32, plain attention, one sequence at a time.

    For models whose router takes the K largest logits, as Qwen3-MoE and Mixtral do.
    """

    def __init__(self, checkpoint: Path) -> None:
        transformers: Any = importlib.import_module("transformers")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            str(checkpoint), dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def check(self, token_ids: Sequence[int], ids: torch.Tensor) -> Comparison:
        """Rows [T, L, K] of the first T tokens of a sequence against the reference."""
        forced: dict[Place, torch.Tensor] = {}
        for _ in range(_ROUNDS):
            found = compare(ids, self.router_logits(token_ids[: len(ids)], forced))
            new = found.ties - forced.keys()
            if not new:
                break
            forced.update({place: ids[place].long() for place in new})
        return found

    def router_logits(
        self, token_ids: Sequence[int], forced: Mapping[Place, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """float32 [T, L, E]; `forced`: expert ids [K] that the router has to take there."""
        with torch.no_grad(), _Forced(forced or {}):
            out = self.model(torch.tensor([list(token_ids)]), output_router_logits=True, use_cache=False)
        return torch.stack([layer.reshape(len(token_ids), -1) for layer in out.router_logits], 1).float()


class _Forced(TorchFunctionMode):
    """Each router calls `torch.topk` once a forward, layer by layer: there it is told what to choose."""

    def __init__(self, forced: Mapping[Place, torch.Tensor]) -> None:
        super().__init__()
        self.forced, self.layer = forced, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.topk or not self.forced:
            return out
        mine = {row: ids for (row, layer), ids in self.forced.items() if layer == self.layer}
        self.layer += 1
        indices = out.indices.clone()
        for row, ids in mine.items():
            indices[row] = ids
        return torch.return_types.topk((args[0].gather(-1, indices), indices))
