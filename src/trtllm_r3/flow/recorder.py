"""The whole road of a row, in order. Read this file first.

    begin_step   the engine is about to run a forward: freeze who owns which row, poison those rows
       ...       the forward: RouteCapturer writes each row's ids (in a graph: its recorded op does)
    end_step     take the rows off the buffer, on their way to the host
    finish       wait for the request's own last step, hand out its rows

One recorder belongs to one engine and is driven by that engine's loop thread alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .capturer import RouteCapturer
from .causes import Cause
from .copier import RouteCopier, Stream, Ticket
from .layout import SKIP, Ints, StepLayout
from .payload import Payload, pack
from .request_store import PerRequestRouteStore

_BROKEN = -2  # next position of a request whose rows were not consecutive: matches none


@dataclass(slots=True, eq=False)
class Track:
    """What a recorder knows of one request that asked for its routes."""

    recorder: RouteRecorder
    slot: int
    start: int
    prefix: int = 0  # positions that the KV cache supplied at the first step
    paused: bool = False
    released: bool = False


class RouteRecorder:
    """Moves rows from the routers of one engine to the requests that asked."""

    def __init__(
        self,
        *,
        moe_layer_ids: Sequence[int],
        top_k: int,
        num_experts: int,
        max_rows: int,
        device: torch.device,
        mode: str = "step",
        staging_slots: int = 4,
        stream: Stream | None = None,
    ) -> None:
        self.moe_layer_ids, self.num_experts = tuple(moe_layer_ids), num_experts
        self.capturer = RouteCapturer(
            max_rows=max_rows,
            layers=len(moe_layer_ids),
            top_k=top_k,
            num_experts=num_experts,
            device=device,
            mode=mode,
        )
        self.copier = RouteCopier(self.capturer.routes_RLK, staging_slots, stream)
        dtype = np.uint8 if self.capturer.routes_RLK.dtype == torch.uint8 else np.int16
        self.store = PerRequestRouteStore(layers=len(moe_layer_ids), top_k=top_k, dtype=dtype)
        self.epoch = 0
        self.degraded = ""  # why nothing is captured any more
        self.counters: Counter[str] = Counter()
        self._step = 0
        self._stamp = 0
        self._layout: StepLayout | None = None
        self._next = np.zeros(0, np.int64)  # per slot: the position that must come next
        self._stamps = np.zeros(0, np.int64)  # per slot: the incarnation that may write
        self._older = np.zeros(0, np.int64)  # the incarnation before it, which may write below _limit
        self._limit = np.zeros(0, np.int64)

    # -- requests

    def open(self, *, start: int, position: int) -> Track:
        """A request that asked is seen for the first time; it computes from `position` on."""
        track = Track(self, self.store.open(), start, prefix=position)
        self._fit(track.slot)
        self._next[track.slot], self._older[track.slot] = position, -1
        self._stamps[track.slot] = self._new_stamp()
        self.counters["requests"] += 1
        return track

    def pause(self, track: Track) -> None:
        """The engine took the request's KV memory away; it will come back, or be cancelled."""
        track.paused = True

    def resume(self, track: Track, *, kept_tokens: int, position: int) -> None:
        """A paused request is computed again from `position`; its first `kept_tokens` tokens are kept.

        Rows that led to a kept token stay (their log-probabilities are those of the first pass);
        later ones belong to tokens that were dropped and are rewritten.
        """
        self._commit_landed()  # under the stamps that these rows were launched with
        slot, limit = track.slot, max(0, kept_tokens - 1)
        self._older[slot], self._limit[slot] = self._stamps[slot], limit
        self._stamps[slot], self._next[slot] = self._new_stamp(), position
        self.store.forget(slot, limit)
        track.paused, track.prefix = False, max(track.prefix, position)
        self.counters["resumed"] += 1

    def finish(self, track: Track, *, num_tokens: int, generated: int) -> Payload:
        """Rows [start, num_tokens - 1), whatever was captured; waits for the request's own last step only."""
        stop = max(track.start, num_tokens - 1)
        self._commit_landed(through=self._last_step_of(track, stop))
        rows, causes, epochs = self.store.read(track.slot, track.start, stop)
        absent = causes == Cause.ABSENT
        absent[max(0, track.prefix - track.start) :] = False
        causes[absent] = Cause.PREFIX
        return pack(
            rows,
            causes,
            epochs,
            start=track.start,
            generated=generated,
            moe_layer_ids=self.moe_layer_ids,
            num_experts=self.num_experts,
            counters=self.counters,
        )

    def release(self, track: Track) -> None:
        """The request is gone; rows of it that are still in flight will be ignored."""
        if not track.released:
            track.released = True
            self._stamps[track.slot] = self._older[track.slot] = -1
            self.store.close(track.slot)

    # -- steps

    def begin_step(self, slots: Sequence[int], positions: Sequence[int], counts: Sequence[int]) -> None:
        """A forward is about to run whose rows are these spans, in this order (SKIP: nobody's)."""
        self.capturer.begin()
        self._layout = None
        self._commit_landed()
        layout = self._freeze(
            np.array(slots, np.int64), np.array(positions, np.int64), np.array(counts, np.int64)
        )
        if not (layout.slots != SKIP).any():
            return
        if self.degraded:
            self._lose(layout, Cause.FAULT)
        elif layout.rows > self.capturer.max_rows:
            self._lose(layout, Cause.BUFFER)
        else:
            self.capturer.routes_RLK[: layout.rows].fill_(self.capturer.poison)
            self._layout = layout

    @property
    def open_layout(self) -> StepLayout | None:
        """The layout of the forward that is running, if somebody wants its rows."""
        return self._layout

    def end_step(self) -> None:
        """The forward has been launched on the current stream."""
        layout, self._layout = self._layout, None
        if layout is not None and not self.copier.stage(layout, self.capturer.routes_RLK):
            self._lose(layout, Cause.STAGING)
        self._commit_landed()

    def abort_step(self, cause: Cause) -> None:
        """The forward failed, or its rows are not those that were frozen."""
        layout, self._layout = self._layout, None
        self.capturer.begin()
        if layout is not None:
            self._lose(layout, cause)

    def fail(self, why: str) -> None:
        """A hook failed: requests keep what they have, nothing more is captured."""
        self.degraded = self.degraded or why
        self.capturer.void()
        self.abort_step(Cause.FAULT)

    # -- the parts

    def _freeze(self, slots: Ints, positions: Ints, counts: Ints) -> StepLayout:
        self._step += 1
        mine = slots != SKIP
        known = slots[mine]
        stamps = np.full(len(slots), -1, np.int64)
        stamps[mine] = self._stamps[known]
        astray = np.zeros(len(slots), bool)
        astray[mine] = self._next[known] != positions[mine]
        self._next[known] = positions[mine] + counts[mine]
        if astray.any():
            self._next[slots[astray]] = _BROKEN
            lost = StepLayout(
                self._step, self.epoch, np.where(astray, slots, SKIP), stamps, positions, counts
            )
            self._lose(lost, Cause.POSITION)
            slots = np.where(astray, SKIP, slots)
        return StepLayout(self._step, self.epoch, slots, stamps, positions, counts)

    def _commit_landed(self, through: int = -1) -> None:
        waits, began = self.copier.waits, time.perf_counter_ns()
        while (ticket := self.copier.landed(through)) is not None:
            self._commit(ticket)
            self.copier.release(ticket)
        if self.copier.waits > waits:
            self.counters["waits"] += self.copier.waits - waits
            self.counters["wait_us"] += (time.perf_counter_ns() - began) // 1000

    def _commit(self, ticket: Ticket) -> None:
        layout = ticket.layout
        row, slot, stamp, position = layout.wanted()
        alive = self._alive(slot, stamp, position)
        rows_NLK = ticket.host_RLK.numpy()
        if len(row) < layout.rows or not alive.all():
            rows_NLK, slot, position = rows_NLK[row[alive]], slot[alive], position[alive]
        if len(slot):
            self.counters["rows"] += len(slot)
            self.counters["rows_missing"] += self.store.commit(slot, position, rows_NLK, layout.epoch)

    def _lose(self, layout: StepLayout, cause: Cause) -> None:
        _, slot, stamp, position = layout.wanted()
        alive = self._alive(slot, stamp, position)
        self.counters[f"lost_{cause.name.lower()}"] += int(alive.sum())
        self.store.mark(slot[alive], position[alive], cause, layout.epoch)

    def _alive(self, slot: Ints, stamp: Ints, position: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        alive = np.asarray(self._stamps[slot] == stamp)
        if not alive.all():
            alive |= (self._older[slot] == stamp) & (position < self._limit[slot])
        return alive

    def _last_step_of(self, track: Track, stop: int) -> int:
        stamps = {int(self._stamps[track.slot]), int(self._older[track.slot])}
        for ticket in reversed(self.copier.tickets):
            if any(ticket.layout.reaches(track.slot, stamp, stop) for stamp in stamps):
                return ticket.layout.step
        return -1

    def _new_stamp(self) -> int:
        self._stamp += 1
        return self._stamp

    def _fit(self, slot: int) -> None:
        if slot >= len(self._next):
            grow = max(16, 2 * slot) - len(self._next)
            for name in ("_next", "_stamps", "_older", "_limit"):
                setattr(self, name, np.concatenate([getattr(self, name), np.full(grow, -1, np.int64)]))
