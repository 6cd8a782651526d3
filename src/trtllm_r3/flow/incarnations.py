"""Which rows of a step may still write, for each store slot.

A request is computed anew after a pause; each such *incarnation* has a stamp. Layouts carry the stamps of
the moment they were frozen, so that rows in flight are told apart from those of a later incarnation, or of
another request in the same slot.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .layout import SKIP, Ints

_BROKEN = -2  # next position of a request whose rows were not consecutive: matches none


class Incarnations:
    """Arrays by slot; everything about a step is one indexed operation."""

    def __init__(self) -> None:
        self._last = 0
        self._next = np.zeros(0, np.int64)  # the position that must come next
        self._stamps = np.zeros(0, np.int64)  # the incarnation that may write
        self._older = np.zeros(0, np.int64)  # the one before it, which may write below _limit
        self._limit = np.zeros(0, np.int64)
        self._asked = np.zeros(0, np.bool_)

    def open(self, slot: int, position: int, asked: bool) -> None:
        """A new request in this slot computes from `position` on."""
        if slot >= len(self._next):
            grow = max(16, 2 * slot) - len(self._next)
            for name in ("_next", "_stamps", "_older", "_limit"):
                setattr(self, name, np.concatenate([getattr(self, name), np.full(grow, -1, np.int64)]))
            self._asked = np.concatenate([self._asked, np.zeros(grow, np.bool_)])
        self._next[slot], self._older[slot], self._asked[slot] = position, -1, asked
        self._stamps[slot] = self._new_stamp()

    def resume(self, slot: int, position: int, limit: int) -> None:
        """The slot's request is computed again; older rows in flight may write below `limit` only."""
        self._older[slot], self._limit[slot] = self._stamps[slot], limit
        self._stamps[slot], self._next[slot] = self._new_stamp(), position

    def close(self, slot: int) -> None:
        """Rows in flight for this slot write nothing."""
        self._stamps[slot] = self._older[slot] = -1

    def stamps_of(self, slot: int) -> set[int]:
        """The stamps under which rows of the slot may still write."""
        return {int(self._stamps[slot]), int(self._older[slot])}

    def freeze(self, slots: Ints, positions: Ints, counts: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """(stamp of each span, whether it does not follow the request's last one) and move on."""
        mine = slots != SKIP
        known = slots[mine]
        stamps, astray = np.full(len(slots), -1, np.int64), np.zeros(len(slots), np.bool_)
        stamps[mine] = self._stamps[known]
        astray[mine] = self._next[known] != positions[mine]
        self._next[known] = positions[mine] + counts[mine]
        if astray.any():
            self._next[slots[astray]] = _BROKEN
        return stamps, astray

    def writing(self, slot_N: Ints, stamp_N: Ints, position_N: Ints) -> npt.NDArray[np.bool_]:
        """Rows of requests that asked: of the present incarnation, or of the one before below its limit."""
        alive = np.asarray(self._stamps[slot_N] == stamp_N)
        if not alive.all():
            alive |= (self._older[slot_N] == stamp_N) & (position_N < self._limit[slot_N])
        alive &= self._asked[slot_N]
        return alive

    def _new_stamp(self) -> int:
        self._last += 1
        return self._last
