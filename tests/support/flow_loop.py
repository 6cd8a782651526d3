"""A fake executor loop around a real recorder, which says beforehand what every row must be.

What is expected is decided when a forward is launched and does not depend on when its copy lands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from support.flow_model import Run, forward
from support.flow_oracle import Shape, expected_ids
from support.flow_stream import HeldStream
from trtllm_r3.flow.causes import Cause
from trtllm_r3.flow.layout import SKIP
from trtllm_r3.flow.payload import unpack
from trtllm_r3.flow.recorder import RouteRecorder, Track
from trtllm_r3.flow.routes import Routes


class Row(NamedTuple):
    """What a position must come out as."""

    nonce: int
    epoch: int
    cause: str = "captured"


@dataclass(eq=False)
class FakeRequest:
    """Tokens of prompt and answer; `fed` is the position that the next forward computes."""

    track: Track
    tokens: list[int]
    prompt: int
    fed: int
    prefix: int
    start: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)  # (copy in flight, lowest position in it)
    astray: bool = False
    resumed: bool = False

    @property
    def to_feed(self) -> int:
        """Tokens that have not been computed."""
        return len(self.tokens) - self.fed


@dataclass(frozen=True)
class Trouble:
    """What goes wrong in one step; `cause` is what its rows must come out with."""

    run: Run = Run()
    cause: str = "captured"
    abort: Cause | None = None
    outside: bool = False  # layer 2 reports an id outside [0, E) in the first row
    jump: bool = False  # the engine gives the first request a position that is one too high


Span = tuple[FakeRequest | None, int]  # None: a dummy, or a request that did not ask


class FakeLoop:
    """Submit, step, land, pause, resume, finish: in any order that an engine may choose."""

    def __init__(self, shape: Shape = Shape(), *, mode: str = "step", staging_slots: int = 3) -> None:
        self.shape, self.slots, self.stream, self.nonce = shape, staging_slots, HeldStream(), 0
        self.recorder = RouteRecorder(
            moe_layer_ids=range(2, 2 + shape.layers),
            top_k=shape.top_k,
            num_experts=shape.experts,
            max_rows=shape.max_rows,
            device=torch.device("cpu"),
            mode=mode,
            staging_slots=staging_slots,
            stream=self.stream,
        )

    def submit(self, prompt: Sequence[int], *, cached: int = 0, start: int = 0) -> FakeRequest:
        track = self.recorder.open(start=start, position=cached)
        return FakeRequest(track, list(prompt), len(prompt), cached, cached, start)

    def step(self, spans: Sequence[Span], trouble: Trouble = Trouble()) -> None:
        """One forward over these spans; a request whose last token was fed gets a new one."""
        self.nonce += 1
        recorder, ids, trouble = self.recorder, self._ids(spans), self._jumping(spans, trouble)
        at = [0 if r is None else r.fed + (trouble.jump and i == 0) for i, (r, _) in enumerate(spans)]
        slots = [SKIP if r is None else r.track.slot for r, _ in spans]
        if trouble.outside and len(ids):
            ids[0, 2, 1] = -1 if self.nonce % 2 else self.shape.experts
        recorder.begin_step(slots, at, [count for _, count in spans])
        staged = recorder.open_layout is not None
        self._run(ids, trouble)
        if trouble.abort is not None:
            recorder.abort_step(trouble.abort)
        staged, full = staged and trouble.abort is None, self.stream.in_flight >= self.slots
        recorder.end_step()
        recorder.capturer.routes_RLK.copy_(_decoys(self.shape))
        row = 0
        for (request, count), position in zip(spans, at, strict=True):
            if request is not None:
                cause = "staging" if staged and full else trouble.cause
                if staged and not full and not request.astray:
                    request.steps.append((len(self.stream.events) - 1, position))
                self._expect(request, position, count, cause, trouble, row)
                self._advance(request, count)
            row += count

    def land(self, copies: int = 1) -> None:
        """The oldest copies arrive; the recorder sees them at its next step."""
        self.stream.land(copies)

    def pause(self, request: FakeRequest, *, drop: int = 0) -> None:
        """Preempt; the last `drop` tokens, still being sampled, are thrown away."""
        self.recorder.pause(request.track)
        for position in range(request.prefix):  # what nobody knew in the first pass is not that of the second
            request.rows.setdefault(position, Row(0, -1, "prefix"))
        del request.tokens[len(request.tokens) - drop :]

    def resume(self, request: FakeRequest, *, cached: int = 0) -> None:
        kept = len(request.tokens)
        self.recorder.resume(request.track, kept_tokens=kept, position=cached)
        request.rows = {p: row for p, row in request.rows.items() if p < kept - 1}
        request.fed, request.prefix = cached, max(request.prefix, cached)
        request.astray = False

    def finish(self, request: FakeRequest, *, cut: int = 0) -> Routes:
        """End now, without the last `cut` tokens; the rows must be exactly those expected."""
        tokens = len(request.tokens) - cut
        stop = max(request.start, tokens - 1)
        self.stream.may_wait_through = max((n for n, low in request.steps if low < stop), default=-1)
        generated = tokens - request.prompt
        payload = self.recorder.finish(request.track, num_tokens=tokens, generated=generated)
        self.stream.may_wait_through = -1
        self.recorder.release(request.track)
        routes = unpack(payload, generated)
        check(routes, request, stop, self.shape)
        return routes

    def _ids(self, spans: Sequence[Span]) -> torch.Tensor:
        tokens, positions = [0], [0]
        for request, count in spans:
            first = 0 if request is None else request.fed
            positions += range(first, first + count)
            tokens += [7] * count if request is None else request.tokens[first : first + count]
        return torch.from_numpy(expected_ids(tokens[1:], positions[1:], self.shape, self.nonce))

    def _jumping(self, spans: Sequence[Span], trouble: Trouble) -> Trouble:
        if not trouble.jump:
            return trouble
        if not spans or spans[0][0] is None or not spans[0][1]:
            return dataclasses.replace(trouble, jump=False)
        spans[0][0].astray = True
        return trouble

    def _run(self, ids: torch.Tensor, trouble: Trouble) -> None:
        try:
            forward(self.recorder.capturer, ids, trouble.run)
        except RuntimeError:
            assert trouble.run.stop_before is not None

    def _expect(
        self, request: FakeRequest, first: int, count: int, cause: str, trouble: Trouble, row: int
    ) -> None:
        for position in range(first, first + count):
            why = cause
            if cause == "captured" and trouble.outside and row == 0 and position == first:
                why = "out of range"
            if request.astray:
                why = "position"
            request.rows.setdefault(position, Row(self.nonce, self.recorder.epoch, why))

    def _advance(self, request: FakeRequest, count: int) -> None:
        request.fed += count
        if count and not request.to_feed:
            request.tokens.append((31 * self.nonce + 17 * len(request.tokens)) % 997)


def check(routes: Routes, request: FakeRequest, stop: int, shape: Shape) -> None:
    """Ids, missing rows, their causes and the epochs are exactly those expected."""
    positions = range(request.start, stop)
    assert routes.positions == positions
    absent = ["prefix" if p < request.prefix else "absent" for p in positions]
    rows = [request.rows.get(p, Row(0, -1, why)) for p, why in zip(positions, absent, strict=True)]
    causes = {p: row.cause for p, row in zip(positions, rows, strict=True) if row.cause != "captured"}
    assert {p: gap.cause for gap in routes.gaps for p in range(gap.start, gap.stop)} == causes
    assert routes.missing.tolist() == [row.cause != "captured" for row in rows]
    assert routes.epochs.tolist() == [row.epoch for row in rows]
    have = ~routes.missing.numpy()
    wanted = expected_ids(request.tokens[request.start : stop], positions, shape, [row.nonce for row in rows])
    assert np.array_equal(routes.ids.numpy()[have], wanted[have])
    assert routes.complete == (not causes)


def _decoys(shape: Shape) -> torch.Tensor:
    """Ids that look real, of a forward that nobody ran: what a late copy would find in the buffer."""
    rows = np.arange(shape.max_rows)
    return torch.from_numpy(expected_ids(rows, rows, shape, 10**6))
