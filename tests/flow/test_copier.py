"""The ring: rows leave the buffer at once, land later, and nobody waits for what is not theirs."""

from __future__ import annotations

import numpy as np
import torch
from support.flow_stream import HeldStream

from trtllm_r3.flow.copier import LazyStream, RouteCopier
from trtllm_r3.flow.layout import StepLayout


def layout_of(step: int, rows: int) -> StepLayout:
    one = [np.array([value], np.int64) for value in (0, 1, 0, rows)]
    return StepLayout(step, 0, *one)


def buffer(value: int) -> torch.Tensor:
    return torch.full((6, 5, 3), value, dtype=torch.uint8)


def copier_of(slots: int) -> tuple[RouteCopier, HeldStream]:
    stream = HeldStream()
    return RouteCopier(buffer(0), slots, stream), stream


def test_rows_are_those_at_staging_time_however_late_the_copy_and_whatever_the_buffer_holds() -> None:
    copier, stream = copier_of(3)
    routes = buffer(0)
    for step in (1, 2, 3):
        routes.fill_(step)
        assert copier.stage(layout_of(step, 2 * step), routes)
        routes.fill_(99)
    assert copier.landed() is None
    stream.land(3)
    for step in (1, 2, 3):
        ticket = copier.landed()
        assert (ticket.layout.step, ticket.host_RLK.shape[0]) == (step, 2 * step)
        assert (ticket.host_RLK == step).all()
    assert copier.landed() is None
    assert copier.waits == stream.waits == 0


def test_a_full_ring_refuses_until_a_ticket_is_released() -> None:
    copier, stream = copier_of(2)
    assert copier.stage(layout_of(1, 2), buffer(1))
    assert copier.stage(layout_of(2, 2), buffer(2))
    assert not copier.stage(layout_of(3, 2), buffer(3))
    stream.land(1)
    ticket = copier.landed()
    assert not copier.stage(layout_of(3, 2), buffer(3)), "its rows have not been read yet"
    copier.release(ticket)
    assert copier.stage(layout_of(4, 2), buffer(4))
    stream.land(2)
    assert [(int(t.host_RLK[0, 0, 0]), t.layout.step) for t in (copier.landed(), copier.landed())] == [
        (2, 2),
        (4, 4),
    ]


def test_only_steps_asked_for_are_waited_for() -> None:
    copier, stream = copier_of(3)
    for step in (1, 2, 3):
        copier.stage(layout_of(step, 2), buffer(step))
    stream.may_wait_through = 1
    assert copier.landed(through=2).layout.step == 1
    assert copier.landed(through=2).layout.step == 2
    assert copier.landed(through=2) is None
    assert copier.waits == 2


def test_a_copy_that_is_done_is_not_waited_for() -> None:
    copier, stream = copier_of(1)
    copier.stage(layout_of(1, 2), buffer(1))
    stream.land(1)
    assert copier.landed(through=1) is not None
    assert copier.waits == 0


def test_the_stream_of_a_cpu_copies_when_asked_and_once() -> None:
    copies: list[int] = []
    event = LazyStream().after_current(lambda: copies.append(1))
    assert copies == []
    assert event.query()
    event.synchronize()
    assert copies == [1]


def test_on_a_cpu_the_source_may_be_poisoned_right_after_staging() -> None:
    copier, routes = RouteCopier(buffer(0), 2), buffer(7)
    copier.stage(layout_of(1, 4), routes)
    routes.fill_(0)
    assert (copier.landed().host_RLK == 7).all()
