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
from dataclasses import dataclass, replace

import numpy as np
import torch

from .capturer import RouteCapturer
from .causes import Cause
from .copier import RouteCopier, Stream, Ticket
from .incarnations import Incarnations
from .layout import SKIP, Ints, StepLayout
from .ops import CHANGED, mark
from .payload import Payload, pack
from .request_store import Causes, Epochs, PerRequestRouteStore, Rows
from .shared_cache import Lease, SharedRouteCache


@dataclass(slots=True, eq=False)
class Track:
    """What a recorder knows of one request. One that did not ask still feeds the shared cache."""

    recorder: RouteRecorder
    slot: int
    start: int
    asked: bool = True
    lease: Lease | None = None
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
        self._layout: StepLayout | None = None
        self._incarnations = Incarnations()
        self.cache: SharedRouteCache | None = None

    # -- requests

    def make_cache(self, *, blocks: int, tokens_per_block: int, complete: bool) -> SharedRouteCache:
        """A cache for this model's rows and so many KV blocks; complete: those are all there are."""
        store = self.store
        return SharedRouteCache(
            blocks=blocks,
            tokens_per_block=tokens_per_block,
            complete=complete,
            layers=store.layers,
            top_k=store.top_k,
            dtype=store.dtype,
        )

    def share(self, cache: SharedRouteCache | None) -> None:
        """Rows of KV blocks are kept in `cache` from now on; None: hits have no rows."""
        self.cache = cache

    def open(self, *, start: int, position: int, asked: bool = True) -> Track:
        """A request is seen for the first time; it computes from `position` on."""
        track = Track(self, self.store.open(), start, asked, prefix=position)
        self._incarnations.open(track.slot, position, asked)
        self.counters["requests"] += asked
        return track

    def lend(
        self, track: Track, *, scope: bytes, blocks: Sequence[int], tokens: Sequence[int], position: int
    ) -> None:
        """The KV blocks in which a request starts to compute at `position`; those before are hits."""
        if self.cache is not None:
            track.lease = self.cache.lease(track.slot, scope, blocks, tokens, position, self._step + 1)

    def extend(self, track: Track, blocks: Sequence[int]) -> None:
        """The request got more KV blocks."""
        if self.cache is not None and track.lease is not None:
            self.cache.extend(track.lease, blocks, self._step + 1)

    def pause(self, track: Track, tokens: Sequence[int] = ()) -> None:
        """The engine takes the request's KV memory away; it will come back, or be cancelled."""
        track.paused = True
        self._commit_landed()
        if track.asked:
            self._keep_hits(track)
        self._give_back(track, tokens)

    def resume(self, track: Track, *, kept_tokens: int, position: int) -> None:
        """A paused request is computed again from `position`; its first `kept_tokens` tokens are kept.

        Rows that led to a kept token stay (their log-probabilities are those of the first pass);
        later ones belong to tokens that were dropped and are rewritten.
        """
        self._commit_landed()  # under the stamps that these rows were launched with
        limit = max(0, kept_tokens - 1)
        self._incarnations.resume(track.slot, position, limit)
        self.store.forget(track.slot, limit)
        track.paused, track.prefix = False, max(track.prefix, position)
        self.counters["resumed"] += 1

    def finish(self, track: Track, *, num_tokens: int, generated: int) -> Payload:
        """Rows [start, num_tokens - 1), whatever was captured; waits for the request's own last step only."""
        stop = max(track.start, num_tokens - 1)
        self._commit_landed(through=self._last_step_of(track, stop))
        rows, causes, epochs = self.store.read(track.slot, track.start, stop)
        hits = self._hits(track, track.start, stop)
        absent = np.flatnonzero(causes[: max(0, track.prefix - track.start)] == Cause.ABSENT)
        causes[absent] = Cause.PREFIX
        told = absent[absent < len(hits[1])]
        rows[told], causes[told], epochs[told] = hits[0][told], hits[1][told], hits[2][told]
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

    def release(self, track: Track, tokens: Sequence[int] = ()) -> None:
        """The request is gone; rows of it that are still in flight are of use to the shared cache only."""
        if not track.released:
            track.released = True
            self._give_back(track, tokens)
            self._incarnations.close(track.slot)
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
        ran = self.capturer.pass_rows  # fewer than the step's: it was cut into several passes
        if layout is not None and ran is not None and ran < layout.rows:
            self._lose(layout, Cause.LAYOUT)
        elif layout is not None and not self.copier.stage(layout, self.capturer.routes_RLK):
            self._lose(layout, Cause.STAGING)
        self._commit_landed()

    def abort_step(self, cause: Cause) -> None:
        """The forward failed, or its rows are not those that were frozen."""
        layout, self._layout = self._layout, None
        self.capturer.begin()
        if layout is not None:
            self._lose(layout, cause)

    def stop(self, why: str) -> None:
        """Requests keep what they have, nothing more is captured from the next step on. From any thread."""
        self.degraded = self.degraded or why

    def fail(self, why: str) -> None:
        """A hook failed in the engine's loop: what it was doing is lost too."""
        self.stop(why)
        self.capturer.void()
        self.abort_step(Cause.FAULT)

    # -- the parts

    def _freeze(self, slots: Ints, positions: Ints, counts: Ints) -> StepLayout:
        self._step += 1
        stamps, astray = self._incarnations.freeze(slots, positions, counts)
        layout = StepLayout(self._step, self.epoch, slots, stamps, positions, counts)
        if astray.any():
            self._lose(replace(layout, slots=np.where(astray, slots, SKIP)), Cause.POSITION)
            layout = replace(layout, slots=np.where(astray, SKIP, slots))
        if self.cache is not None:
            _, slot, _, position = layout.wanted()
            layout = replace(layout, kv=self.cache.places(slot, position))
        return layout

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
        rows_NLK = ticket.host_RLK.numpy()
        if len(row) < layout.rows:
            rows_NLK = rows_NLK[row]
        causes = self.store.causes_of(rows_NLK)
        if (causes == Cause.CHANGED).any():
            # One layer was watched and its ids were written to; those of the others are no better known.
            rows_NLK = np.full_like(rows_NLK, mark(CHANGED, rows_NLK.shape[-1]))
            causes = np.full_like(causes, Cause.CHANGED)
        if self.cache is not None and layout.kv is not None:
            known = layout.kv >= 0
            self.cache.write(layout.kv[known], rows_NLK[known], causes[known], layout.epoch, layout.step)
        mine = self._incarnations.writing(slot, stamp, position)
        if not mine.all():
            rows_NLK, causes, slot, position = rows_NLK[mine], causes[mine], slot[mine], position[mine]
        if len(slot):
            missing, drift = self.store.commit(slot, position, rows_NLK, layout.epoch, causes)
            self.counters["rows"] += len(slot)
            self.counters["rows_missing"] += missing
            self.counters["rows_recomputed_otherwise"] += drift

    def _lose(self, layout: StepLayout, cause: Cause) -> None:
        _, slot, stamp, position = layout.wanted()
        alive = self._incarnations.writing(slot, stamp, position)
        self.counters[f"lost_{cause.name.lower()}"] += int(alive.sum())
        self.store.mark(slot[alive], position[alive], cause, layout.epoch)

    def _hits(self, track: Track, start: int, stop: int) -> tuple[Rows, Causes, Epochs]:
        """Rows, causes and epochs of positions from `start` on that came out of the KV cache."""
        lease = track.lease
        if self.cache is None or lease is None or not track.asked:
            return self.store.read(track.slot, start, start)
        return self.cache.read(lease, start, max(start, min(stop, lease.first)))

    def _keep_hits(self, track: Track) -> None:
        """Before the KV is given back. A hit that is not known now stays missing: its row is that of an
        earlier pass, and the pass after the pause would compute another one."""
        slots = np.full(track.prefix, track.slot, np.int64)
        rows, causes, epochs = self._hits(track, 0, track.prefix)
        known = np.flatnonzero(causes == Cause.CAPTURED)
        self.store.commit(slots[known], known, rows[known], epochs[known], causes[known])
        self.store.mark(slots, np.arange(track.prefix), Cause.PREFIX, -1)

    def _give_back(self, track: Track, tokens: Sequence[int]) -> None:
        """The request loses its KV blocks; what it computed stays findable in them."""
        if self.cache is not None and track.lease is not None:
            self.cache.let_go(track.lease, tokens)
        track.lease = None

    def _last_step_of(self, track: Track, stop: int) -> int:
        stamps = self._incarnations.stamps_of(track.slot)
        for ticket in reversed(self.copier.tickets):
            if any(ticket.layout.reaches(track.slot, stamp, stop) for stamp in stamps):
                return ticket.layout.step
        return -1
