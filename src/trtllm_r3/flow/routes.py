"""Routes: the value that leaves, with everything a trainer needs to trust or to refuse it.

T rows returned, L MoE layers, K experts a token, E experts of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Gap(NamedTuple):
    """Positions [start, stop) whose row is missing, and why (see `Cause` for the names)."""

    start: int
    stop: int
    cause: str


class Run(NamedTuple):
    """Positions [start, stop) routed under weight version `version`."""

    start: int
    stop: int
    version: int


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts that the router chose, one row a token (arXiv 2510.11370, RFC TensorRT-LLM#17778).

    ids: int16 CPU tensor [T, L, K], K distinct ids in [0, num_experts) in the engine's own order, or -1
        where a layer's ids are not known. Row i is of the token at absolute position `start + i`, counted
        over prompt and answer; a whole sequence of S tokens has S - 1 rows, since the last token was
        never fed to the model. None if there are no routes at all; then `why_none` says why.
    moe_layer_ids: decoder index of each layer of the L axis (dense layers are not on it).
    gaps: the missing rows. versions: which weights routed which rows; none for rows never computed.
    source: "trtllm-r3", or "native" where the engine's own feature made them; then `complete` is None.
    counters: what the worker that captured these rows has counted so far.
    """

    ids: torch.Tensor | None
    start: int = 0
    moe_layer_ids: tuple[int, ...] = ()
    num_experts: int = 0
    gaps: tuple[Gap, ...] = ()
    versions: tuple[Run, ...] = ()
    source: str = "trtllm-r3"
    why_none: str | None = None
    counters: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return 0 if self.ids is None else len(self.ids)

    def __repr__(self) -> str:
        if self.ids is None:
            return f"Routes(None: {self.why_none})"
        missing = sum(gap.stop - gap.start for gap in self.gaps)
        return (
            f"Routes({len(self)} rows from {self.start}, {len(self.moe_layer_ids)} layers, "
            f"top-{self.top_k} of {self.num_experts}, {missing} missing)"
        )

    @property
    def top_k(self) -> int:
        """Experts a token and layer; 0 if there are no routes."""
        return 0 if self.ids is None else self.ids.shape[-1]

    @property
    def positions(self) -> range:
        """Absolute position of each row's token."""
        return range(self.start, self.start + len(self))

    @property
    def missing(self) -> torch.Tensor:
        """bool [T]: rows in which at least one layer's ids are not known."""
        if self.ids is None:
            return torch.zeros(0, dtype=torch.bool)
        return (self.ids < 0).flatten(1).any(1)

    @property
    def complete(self) -> bool | None:
        """Whether every row is there; None where nobody can tell (native routes carry no mark)."""
        if self.source == "native":
            return None
        return self.ids is not None and not self.gaps

    @property
    def epochs(self) -> torch.Tensor:
        """int32 [T]: the weight version under which each row was routed, -1 where nothing is known."""
        out = torch.full((len(self),), -1, dtype=torch.int32)
        for run in self.versions:
            out[run.start - self.start : run.stop - self.start] = run.version
        return out
