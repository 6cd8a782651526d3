"""Which row of a forward belongs to which position of which request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
SKIP = -1  # slot of a span whose rows are of use to nobody, a dummy for instance


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Frozen when the step is launched; nothing later reads live request objects.

    Spans follow each other in row order: span i is `counts[i]` rows of the request in store slot
    `slots[i]` (SKIP: of nobody), from absolute position `positions[i]` on. `stamps[i]` names the
    incarnation of the slot, so that a slot handed to another request never takes older rows.
    """

    step: int
    epoch: int
    slots: Ints
    stamps: Ints
    positions: Ints
    counts: Ints
    kv: Ints | None = None  # per wanted row: its KV slot (block * B + offset), -1 = none

    @property
    def rows(self) -> int:
        """Rows of the forward, dummies included, padding not."""
        return int(self.counts.sum())

    def wanted(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Per row that somebody wants: (row in the buffer, slot, stamp, position), each int64 [N]."""
        counts = self.counts
        if int(counts.max(initial=0)) == 1 == int(counts.min(initial=1)):
            rows = np.flatnonzero(self.slots != SKIP)
            return rows, self.slots[rows], self.stamps[rows], self.positions[rows]
        first = np.cumsum(counts) - counts
        span = np.repeat(np.arange(len(counts)), counts)
        row = np.arange(len(span), dtype=np.int64)
        keep = self.slots[span] != SKIP
        if not keep.all():
            row, span = row[keep], span[keep]
        return row, self.slots[span], self.stamps[span], (self.positions - first)[span] + row

    def reaches(self, slot: int, stamp: int, before: int) -> bool:
        """Whether this step holds a row of that request at a position below `before`."""
        mine = (self.slots == slot) & (self.stamps == stamp) & (self.positions < before)
        return bool(mine.any())
