"""Preemption, recompute and slots that change hands while rows are in flight."""

from __future__ import annotations

import pytest
from support.flow_loop import FakeLoop, FakeRequest, Trouble
from support.flow_model import Run

PROMPT = [5, 3, 8, 1, 9, 2, 6]


def started(loop: FakeLoop, tokens: int) -> FakeRequest:
    """A request with `tokens` generated, everything landed."""
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    loop.land()
    for _ in range(tokens - 1):
        loop.step([(request, 1)])
        loop.land()
    return request


def recompute(loop: FakeLoop, request: FakeRequest, chunk: int = 4) -> None:
    """The context steps of a resumed request, up to its next sampled token."""
    while request.to_feed > 1:
        loop.step([(request, min(chunk, request.to_feed))])
        loop.land()
    if request.to_feed:
        loop.step([(request, 1)])


@pytest.mark.parametrize("drop", [0, 1])
@pytest.mark.parametrize("landed", [True, False])
def test_rows_of_the_first_pass_stay_and_the_dropped_token_s_row_is_rewritten(
    drop: int, landed: bool
) -> None:
    loop = FakeLoop(staging_slots=6)
    request = started(loop, 5)
    loop.step([(request, 1)])
    loop.land(int(landed))
    loop.pause(request, drop=drop)
    first_pass = dict(request.rows)
    loop.resume(request)
    kept = len(request.tokens)
    recompute(loop, request)
    routes = loop.finish(request)
    assert routes.complete
    assert [request.rows[p] for p in range(kept - 1)] == [first_pass[p] for p in range(kept - 1)]
    assert request.rows[kept - 1].nonce > max(row.nonce for row in first_pass.values())


def test_two_preemptions_shift_nothing() -> None:
    loop = FakeLoop()
    request = started(loop, 5)
    loop.pause(request, drop=1)
    loop.resume(request)
    recompute(loop, request)
    for _ in range(4):
        loop.land()
        loop.step([(request, 1)])
    loop.land()
    loop.pause(request)
    loop.resume(request, cached=4)
    recompute(loop, request)
    assert loop.finish(request).complete


def test_a_row_in_flight_of_the_old_incarnation_below_the_limit_is_kept_over_the_recomputed_one() -> None:
    loop = FakeLoop(staging_slots=6)
    request = started(loop, 2)
    loop.step([(request, 1)])
    loop.step([(request, 1)])
    loop.pause(request, drop=1)
    old = request.rows[8]
    loop.resume(request)
    loop.step([(request, len(request.tokens))])
    assert loop.finish(request).complete
    assert request.rows[8] == old


def test_a_row_that_was_lost_before_a_preemption_is_not_filled_by_the_recompute() -> None:
    loop = FakeLoop()
    request = started(loop, 2)
    loop.step([(request, 1)], Trouble(Run(silent=(0,)), "not captured"))
    loop.land()
    loop.step([(request, 1)])
    loop.land()
    loop.pause(request)
    loop.resume(request)
    recompute(loop, request)
    assert [tuple(gap) for gap in loop.finish(request).gaps] == [(8, 9, "not captured")]


def test_a_request_paused_before_its_prompt_was_done_begins_again() -> None:
    loop = FakeLoop()
    request = loop.submit(PROMPT)
    loop.step([(request, 4)])
    loop.pause(request)
    loop.resume(request)
    recompute(loop, request, chunk=5)
    assert loop.finish(request).complete


def test_rows_not_consecutive_are_trusted_again_after_a_resume() -> None:
    loop = FakeLoop()
    request = started(loop, 2)
    loop.step([(request, 1)], Trouble(jump=True))
    loop.step([(request, 1)])
    loop.pause(request, drop=2)
    loop.resume(request)
    recompute(loop, request)
    loop.land()
    loop.step([(request, 1)])
    assert loop.finish(request).complete


def test_a_request_cancelled_while_paused_has_the_rows_of_its_kept_tokens() -> None:
    loop = FakeLoop()
    request = started(loop, 4)
    loop.pause(request, drop=1)
    routes = loop.finish(request)
    assert routes.complete
    assert len(routes) == 9


def test_a_slot_handed_on_while_a_step_is_in_flight_takes_no_foreign_row() -> None:
    loop = FakeLoop()
    first = started(loop, 2)
    loop.step([(first, 1)])
    slot = first.track.slot
    loop.finish(first, cut=1)
    second = loop.submit([90, 91, 92, 93, 94, 95, 96, 97, 98])
    assert second.track.slot == slot
    loop.step([(second, 3)])
    loop.land(2)
    routes = loop.finish(second)
    assert [tuple(gap) for gap in routes.gaps] == [(3, 8, "absent")]


def test_a_step_in_flight_of_a_released_request_leaves_nothing_behind() -> None:
    loop = FakeLoop()
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    loop.recorder.release(request.track)
    loop.recorder.release(request.track)
    loop.land()
    loop.step([(None, 1)])
    store = loop.recorder.store
    assert (store.live, store.pages_used) == (0, 0)
    assert loop.recorder.copier.tickets == loop.recorder.copier.tickets.__class__()


def test_two_thousand_requests_one_after_another_leave_no_state() -> None:
    loop = FakeLoop()
    before = loop.recorder.store.nbytes
    for i in range(2000):
        track = loop.recorder.open(start=0, position=0)
        if i % 3:
            loop.recorder.begin_step([track.slot], [0], [2])
            loop.recorder.end_step()
            loop.land()
        loop.recorder.finish(track, num_tokens=3, generated=1)
        loop.recorder.release(track)
    loop.land(3)
    loop.recorder.begin_step([], [], [])
    store = loop.recorder.store
    assert (store.live, store.pages_used, store.nbytes) == (0, 0, before)
    assert not loop.recorder.copier.tickets
    assert loop.recorder.counters["requests"] == 2000
