"""Rows of many requests through one recorder: each case an engine's schedule, written out."""

from __future__ import annotations

import pytest
from support.flow_loop import FakeLoop, Trouble
from support.flow_model import Run

from trtllm_r3.flow.causes import Cause

PROMPT = [5, 3, 8, 1, 9, 2, 6]


@pytest.fixture(params=["step", "layer"])
def loop(request: pytest.FixtureRequest) -> FakeLoop:
    return FakeLoop(mode=request.param)


def decode(loop: FakeLoop, request: object, steps: int, **trouble: object) -> None:
    for _ in range(steps):
        loop.step([(request, 1)], Trouble(**trouble))
        loop.land()


@pytest.mark.parametrize("generated", [1, 2, 17])
def test_a_request_has_a_row_for_each_token_but_the_last(loop: FakeLoop, generated: int) -> None:
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    decode(loop, request, generated - 1)
    routes = loop.finish(request)
    assert len(routes) == 7 + generated - 1
    assert routes.complete


def test_the_extra_row_of_an_overlapped_loop_is_dropped(loop: FakeLoop) -> None:
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    decode(loop, request, 3)
    assert len(loop.finish(request, cut=1)) == 9


def test_chunks_of_a_prompt_beside_decoding_requests_and_dummies_land_where_they_belong(
    loop: FakeLoop,
) -> None:
    old, new = loop.submit(PROMPT), loop.submit(range(100, 113))
    loop.step([(old, 4)])
    loop.step([(new, 5), (None, 2), (old, 3)])
    loop.land(2)
    loop.step([(None, 3), (new, 5), (old, 1)])
    loop.step([(new, 3), (old, 1), (None, 1)], Trouble(Run(padding=6)))
    assert loop.finish(old).complete
    assert loop.finish(new).complete


def test_a_layer_that_does_not_report_in_one_step_costs_the_rows_of_that_step_only(loop: FakeLoop) -> None:
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    decode(loop, request, 1, run=Run(silent=(3,)), cause="not captured")
    decode(loop, request, 2)
    assert [tuple(gap) for gap in loop.finish(request).gaps] == [(7, 8, "not captured")]


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble(Run(skipped=(1,)), "not captured"),
        Trouble(Run(twice=(2,)), "not captured"),
        Trouble(Run(twice=(4,)), "not captured"),
        Trouble(Run(copies=True, chunk=1), "not captured"),
        Trouble(Run(stop_before=3), "fault", Cause.FAULT),
        Trouble(cause="layout", abort=Cause.LAYOUT),
        Trouble(outside=True),
        Trouble(jump=True),
    ],
    ids=["skipped", "twice", "last layer twice", "copied chunks", "raised", "layout", "range", "jump"],
)
def test_a_step_that_goes_wrong_marks_its_rows_and_shifts_none(loop: FakeLoop, trouble: Trouble) -> None:
    one, two = loop.submit(PROMPT), loop.submit([4, 4])
    loop.step([(one, 7), (two, 2)])
    loop.step([(one, 1), (two, 1)], trouble)
    loop.land(2)
    loop.step([(two, 1), (one, 1)])
    loop.finish(one)
    loop.finish(two)


def test_a_full_ring_costs_the_step_its_rows_and_says_staging(loop: FakeLoop) -> None:
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    for _ in range(4):
        loop.step([(request, 1)])
    loop.land(3)
    loop.step([(request, 1)])
    assert [tuple(gap) for gap in loop.finish(request).gaps] == [(9, 11, "staging")]


def test_a_forward_larger_than_the_buffer_is_not_cut_but_missing(loop: FakeLoop) -> None:
    request = loop.submit(range(30))
    loop.step([(request, 24)])
    loop.step([(None, 19), (request, 6)], Trouble(cause="buffer"))
    decode(loop, request, 2)
    assert [tuple(gap) for gap in loop.finish(request).gaps] == [(24, 30, "buffer")]


def test_positions_taken_from_the_kv_cache_are_missing_with_cause_prefix(loop: FakeLoop) -> None:
    request = loop.submit(PROMPT, cached=4)
    loop.step([(request, 3)])
    assert [tuple(gap) for gap in loop.finish(request).gaps] == [(0, 4, "prefix")]


@pytest.mark.parametrize("start", [0, 3, 7, 8, 20])
def test_a_start_gives_the_tail_of_the_rows_and_no_more(loop: FakeLoop, start: int) -> None:
    request = loop.submit(PROMPT, start=start)
    loop.step([(request, 7)])
    decode(loop, request, 1)
    assert len(loop.finish(request)) == max(0, 8 - start)


def test_one_prompt_token_and_no_answer_give_no_rows_and_no_error(loop: FakeLoop) -> None:
    routes = loop.finish(loop.submit([5]))
    assert tuple(routes.ids.shape) == (0, 5, 3)
    assert routes.complete


def test_after_a_fault_rows_at_hand_stay_and_later_ones_say_fault(loop: FakeLoop) -> None:
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    loop.recorder.fail("a hook raised")
    decode(loop, request, 2, cause="fault")
    late = loop.submit([1, 2])
    loop.step([(late, 2)], Trouble(cause="fault"))
    loop.finish(request)
    loop.finish(late)
    assert loop.recorder.degraded == "a hook raised"


def test_rows_carry_the_epoch_of_the_forward_that_made_them(loop: FakeLoop) -> None:
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    loop.recorder.epoch = 3
    decode(loop, request, 2)
    assert [tuple(run) for run in loop.finish(request).versions] == [(0, 7, 0), (7, 9, 3)]


def test_a_finish_waits_for_the_last_step_of_its_own_request_and_no_later_one(loop: FakeLoop) -> None:
    one, two = loop.submit(PROMPT), loop.submit([4, 4])
    loop.step([(one, 7), (two, 2)])
    loop.step([(one, 1)])
    loop.step([(two, 1)])
    loop.finish(one)
    assert (loop.stream.waits, loop.stream.landed) == (2, 2)
    assert loop.recorder.counters["waits"] == 2


def test_a_finish_whose_rows_have_landed_waits_for_nothing(loop: FakeLoop) -> None:
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    loop.land()
    loop.step([(None, 1)])
    loop.finish(request)
    assert loop.stream.waits == 0


def test_a_step_without_askers_copies_nothing(loop: FakeLoop) -> None:
    loop.step([(None, 5)])
    assert loop.stream.events == []
