"""Rows of each live request by absolute position, in one paged arena.

R rows of the arena, N rows of one commit, T positions of one request, L MoE layers, K experts a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .causes import DEVICE_CAUSES, Cause
from .layout import Ints
from .ops import NOT_CAPTURED, mark

PAGE = 64  # positions; a short request wastes at most 63 rows

Rows = npt.NDArray[Any]
Causes = npt.NDArray[np.uint8]
Epochs = npt.NDArray[np.int32]
# Plain integers: numpy asks an enum member a dozen questions first.
_ABSENT, _CAPTURED = int(Cause.ABSENT), int(Cause.CAPTURED)
_DEVICE_CAUSES = np.array(DEVICE_CAUSES, np.uint8)


class PerRequestRouteStore:
    """The first write of a position wins: it belongs to the forward that produced the kept token.

    A request has a slot; a page table maps (slot, position // PAGE) to a page of the arena, so that a
    step of any mix of requests is one indexed write. The arena doubles when more pages are in use than
    were reserved, and is never given back.
    """

    def __init__(self, *, layers: int, top_k: int, dtype: npt.DTypeLike, pages: int = 64) -> None:
        self.layers, self.top_k, self.dtype = layers, top_k, np.dtype(dtype)
        self._row = np.dtype((np.void, layers * top_k * self.dtype.itemsize))
        self._arena = np.empty(pages * PAGE, self._row)
        self._cause = np.zeros(pages * PAGE, np.uint8)
        self._epoch = np.zeros(pages * PAGE, np.int32)
        self._free_pages = list(range(pages - 1, -1, -1))
        self._table = np.full((16, 8), -1, np.int64)
        self._free_slots = list(range(15, -1, -1))

    @property
    def live(self) -> int:
        """Requests with a slot."""
        return len(self._table) - len(self._free_slots)

    @property
    def pages_used(self) -> int:
        """Pages of the arena that belong to a request."""
        return len(self._arena) // PAGE - len(self._free_pages)

    @property
    def nbytes(self) -> int:
        """Host memory of the arena."""
        return self._arena.nbytes + self._cause.nbytes + self._epoch.nbytes

    def open(self) -> int:
        """A slot for a new request."""
        if not self._free_slots:
            have = len(self._table)
            self._table = np.concatenate([self._table, np.full_like(self._table, -1)])
            self._free_slots = list(range(2 * have - 1, have - 1, -1))
        return self._free_slots.pop()

    def close(self, slot: int) -> None:
        """The request is gone: its pages and its slot are free."""
        held = self._table[slot]
        self._free_pages.extend(held[held >= 0].tolist())
        held[:] = -1
        self._free_slots.append(slot)

    def commit(
        self,
        slots_N: Ints,
        positions_N: Ints,
        rows_NLK: Rows,
        epoch: int | Epochs,
        causes_N: Causes | None = None,
    ) -> tuple[int, int]:
        """Store the rows of positions that have none yet.

        Returns how many of them lack ids, and how many positions had other ids already: the drift
        between two computations of the same position.
        """
        causes_N = self.causes_of(rows_NLK) if causes_N is None else causes_N
        at, fresh = self._claim(slots_N, positions_N)
        drift = 0
        if not fresh.all():
            seen = ~fresh & (self._cause[at] == _CAPTURED) & (causes_N == _CAPTURED)
            again = self._packed(np.ascontiguousarray(rows_NLK[seen]))
            drift = int(np.count_nonzero(self._arena[at[seen]] != again))
            at, rows_NLK, causes_N = at[fresh], rows_NLK[fresh], causes_N[fresh]
            epoch = epoch[fresh] if isinstance(epoch, np.ndarray) else epoch
        self._arena[at] = self._packed(np.ascontiguousarray(rows_NLK))
        self._cause[at] = causes_N
        self._epoch[at] = epoch
        return int(np.count_nonzero(causes_N != _CAPTURED)), drift

    def mark(self, slots_N: Ints, positions_N: Ints, cause: Cause, epoch: int) -> None:
        """These positions were computed but their rows are lost."""
        at, fresh = self._claim(slots_N, positions_N)
        at = at[fresh]
        self._arena.view(self.dtype).reshape(len(self._arena), -1)[at] = mark(0, self.top_k)
        self._cause[at] = cause
        self._epoch[at] = epoch

    def forget(self, slot: int, first: int) -> None:
        """Rows from position `first` on belong to tokens that were dropped; they will be rewritten."""
        at = self._places(slot, first, self._table.shape[1] * PAGE)
        self._cause[at[at >= 0]] = _ABSENT

    def read(self, slot: int, start: int, stop: int) -> tuple[Rows, Causes, Epochs]:
        """(ids [T, L, K], causes [T], epochs [T]) of positions [start, stop); always stop - start rows.

        A position that was never computed has the epoch -1.
        """
        places = self._places(slot, start, stop)
        at = np.maximum(places, 0)
        rows_TLK = self._arena[at].view(self.dtype).reshape(len(at), self.layers, self.top_k)
        causes, epochs = self._cause[at], self._epoch[at]
        causes[places < 0] = _ABSENT
        absent = causes == _ABSENT
        if absent.any():
            rows_TLK[absent], epochs[absent] = mark(0, self.top_k), -1
        return rows_TLK, causes, epochs

    def _packed(self, rows_NLK: Rows) -> Rows:
        """The same memory as one item a row, [N]."""
        return rows_NLK.reshape(len(rows_NLK), self.layers * self.top_k).view(self._row)[:, 0]

    def _places(self, slot: int, start: int, stop: int) -> Ints:
        """Arena row of each position, -1 where no page is; positions that were not computed have none."""
        pages, offsets = np.divmod(np.arange(start, max(start, stop), dtype=np.int64), PAGE)
        table = np.append(self._table[slot], -1)
        held = table[np.minimum(pages, len(table) - 1)]
        return np.where(held < 0, -1, held * PAGE + offsets)

    def _claim(self, slots_N: Ints, positions_N: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        pages_N = positions_N // PAGE
        last = int(pages_N.max(initial=-1))
        if last >= self._table.shape[1]:
            wider = np.full((len(self._table), max(2 * self._table.shape[1], last + 1)), -1, np.int64)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        where = self._table[slots_N, pages_N]
        lacking = where < 0
        if lacking.any():
            self._give_pages(slots_N[lacking], pages_N[lacking])
            where = self._table[slots_N, pages_N]
        at = where * PAGE + positions_N % PAGE
        return at, self._cause[at] == _ABSENT

    def _give_pages(self, slots: Ints, pages: Ints) -> None:
        """A page for each (slot, page index) named; those may be named more than once."""
        width = self._table.shape[1]
        wanted = slots * width + pages
        turns = np.append(0, np.flatnonzero(np.diff(wanted)) + 1)
        wanted = np.unique(wanted[turns])
        while len(self._free_pages) < len(wanted):
            self._add_pages(len(self._arena) // PAGE)
        fresh = self._free_pages[-len(wanted) :]
        del self._free_pages[-len(wanted) :]
        self._table[wanted // width, wanted % width] = fresh
        self._cause.reshape(-1, PAGE)[fresh] = _ABSENT

    def reserve(self, positions: int) -> None:
        """Room for so many positions at once, so that the arena is not copied while requests run.

        Costs address space only: memory is paid for as pages are used.
        """
        lacking = -(-positions // PAGE) - len(self._arena) // PAGE
        if lacking > 0:
            self._add_pages(lacking)

    def _add_pages(self, count: int) -> None:
        have, rows = len(self._arena) // PAGE, len(self._arena) + count * PAGE
        for name, fresh in (
            ("_arena", np.empty(rows, self._row)),
            ("_cause", np.zeros(rows, np.uint8)),
            ("_epoch", np.zeros(rows, np.int32)),
        ):
            fresh[: have * PAGE] = getattr(self, name)
            setattr(self, name, fresh)
        self._free_pages.extend(range(have + count - 1, have - 1, -1))

    def causes_of(self, rows_NLK: Rows) -> Causes:
        """Per row: CAPTURED, or what the first marked layer says."""
        causes = np.full(len(rows_NLK), _CAPTURED, np.uint8)
        missing_NL = missing_layers(rows_NLK)
        if missing_NL.any():  # of all at once, which costs a tenth of asking each row
            bad = np.flatnonzero(missing_NL.any(1))
            marks = rows_NLK[bad, missing_NL[bad].argmax(1), 0].astype(np.int64)
            codes = np.abs(marks - mark(0, self.top_k))
            causes[bad] = _DEVICE_CAUSES[np.where(codes < len(_DEVICE_CAUSES), codes, NOT_CAPTURED)]
        return causes


def missing_layers(rows_NLK: Rows) -> npt.NDArray[np.bool_]:
    """[N, L]: which ids are a mark. K > 1: two equal ids can't be a top-k, whatever put them there."""
    if rows_NLK.shape[-1] == 1:
        return np.asarray(rows_NLK[..., 0] < 0)
    return np.asarray(rows_NLK[..., 0] == rows_NLK[..., 1])
