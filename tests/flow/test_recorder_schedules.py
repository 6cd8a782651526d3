"""Random schedules through one recorder: every row exact, every missing row foretold with its cause."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.flow_loop import FakeLoop, FakeRequest, Trouble
from support.flow_model import Run

from trtllm_r3.flow.causes import Cause

SOUND = [
    Trouble(),
    Trouble(Run(chunk=3)),
    Trouble(Run(chunk=2, chunk_order=2)),
    Trouble(Run(chunk=4, chunk_order=-1, rerun_first=True)),
    Trouble(Run(padding=3)),
]
FAULTS = [
    Trouble(Run(silent=(1,)), "not captured"),
    Trouble(Run(skipped=(4,)), "not captured"),
    Trouble(Run(twice=(0,)), "not captured"),
    Trouble(Run(stop_before=2), "fault", Cause.FAULT),
    Trouble(cause="layout", abort=Cause.LAYOUT),
    Trouble(outside=True),
    Trouble(jump=True),
]
ON_DEVICE = [trouble for trouble in FAULTS if trouble.abort is None and not trouble.jump]
TROUBLES = st.one_of(st.sampled_from(SOUND), st.sampled_from(SOUND), st.sampled_from(SOUND + FAULTS))


class Schedules(RuleBasedStateMachine):
    """What an engine may do to its requests, in any order."""

    troubles = TROUBLES
    loses_on_host = True  # steps may find the ring full or the buffer too small

    @initialize(mode=st.sampled_from(["step", "layer"]), slots=st.integers(1, 4))
    def build(self, mode: str, slots: int) -> None:
        self.loop = FakeLoop(mode=mode, staging_slots=slots)
        self.live: list[FakeRequest] = []
        self.paused: list[FakeRequest] = []

    @precondition(lambda self: len(self.live) + len(self.paused) < 5)
    @rule(data=st.data(), prompt=st.integers(1, 12))
    def submit(self, data: st.DataObject, prompt: int) -> None:
        cached = data.draw(st.sampled_from([0, 0, prompt // 2, prompt - 1]))
        start = data.draw(st.sampled_from([0, 0, prompt // 3, prompt]))
        tokens = [(prompt * 37 + i * i) % 997 for i in range(prompt)]
        self.live.append(self.loop.submit(tokens, cached=cached, start=start))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), steps=st.integers(1, 6))
    def steps(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            self.step(data, data.draw(self.troubles))
            self.loop.land(data.draw(st.sampled_from([0, 1, 1, 2])))

    def step(self, data: st.DataObject, trouble: Trouble) -> None:
        chosen = [r for r in self.live if data.draw(st.integers(0, 3))]
        spans = [(r, min(r.to_feed, data.draw(st.integers(1, 6)))) for r in chosen]
        dummies = data.draw(st.lists(st.integers(1, 3), max_size=2))
        for count in dummies:
            spans.insert(data.draw(st.integers(0, len(spans))), (None, count))
        rows = sum(count for _, count in spans)
        if rows + trouble.run.padding > self.loop.shape.max_rows:
            spans.append((None, 24))
            trouble = Trouble(cause="buffer")
        if not self.loses_on_host:
            self.loop.land(max(0, self.loop.stream.in_flight + 1 - self.loop.slots))
            if trouble.cause == "buffer":
                return
        if any(count for r, count in spans if r is not None):
            self.loop.step(spans, trouble)

    @rule(copies=st.integers(1, 4))
    def land(self, copies: int) -> None:
        self.loop.land(copies)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        request = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        generated = len(request.tokens) - request.prompt
        self.loop.pause(request, drop=data.draw(st.integers(0, min(1, generated))))
        self.paused.append(request)

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        request = self.paused.pop(0)
        # A second resume while rows of the first incarnation fly is a case of its own.
        self.loop.land(self.loop.stream.in_flight)
        kept = len(request.tokens)
        self.loop.resume(request, cached=data.draw(st.integers(0, kept - 1)))
        self.live.append(request)

    @precondition(lambda self: self.live + self.paused)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        everyone = self.live + self.paused
        request = everyone[data.draw(st.integers(0, len(everyone) - 1))]
        (self.live if request in self.live else self.paused).remove(request)
        generated = len(request.tokens) - request.prompt
        self.loop.finish(request, cut=data.draw(st.integers(0, min(1, generated))))

    @rule()
    def new_weights(self) -> None:
        self.loop.recorder.epoch += 1

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "loop"):
            assert self.loop.recorder.store.live == len(self.live) + len(self.paused)
            assert not self.loop.recorder.degraded

    def teardown(self) -> None:
        for request in getattr(self, "live", []) + getattr(self, "paused", []):
            self.loop.finish(request)


class RowsInFlight(Schedules):
    """A preempted request comes back, once, while rows of its first incarnation fly.

    A step that is lost on the host (no free slot, aborted) is marked at once, before older rows have landed:
    recomputed positions then come out missing, not wrong. So here the ring has room, and faults are on the device.
    """

    troubles = st.sampled_from(SOUND + SOUND + ON_DEVICE)
    loses_on_host = False

    @precondition(lambda self: any(not r.resumed for r in self.paused))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        request = next(r for r in self.paused if not r.resumed)
        self.paused.remove(request)
        request.resumed = True
        kept = len(request.tokens)
        self.loop.resume(request, cached=data.draw(st.integers(0, kept - 1)))
        self.live.append(request)


SETTINGS = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("machine", [Schedules, RowsInFlight])
def test_any_schedule_gives_exact_rows_and_foretold_gaps(machine: type[RuleBasedStateMachine]) -> None:
    case = machine.TestCase
    case.settings = SETTINGS
    case("runTest").runTest()
