"""Checks that tests run on the package as it is, and that mutation tests run on a package with one fault."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import torch

from support.flow_loop import FakeLoop, Trouble
from support.flow_model import Run, capturer_of
from support.flow_oracle import Shape, expected_ids

SHAPE = Shape()
PROMPT = [5, 3, 8, 1, 9, 2, 6]


class RecyclingPool:
    """Tensors whose memory is overwritten with other ids as soon as nobody keeps the tensor."""

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []

    def put(self, ids: np.ndarray) -> torch.Tensor:
        block = np.ascontiguousarray(ids).copy()
        self.blocks.append(block)
        view = block[:]
        weakref.finalize(view, block.fill, 0)
        return torch.from_numpy(view)


def address_only(ids: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that keeps nobody alive: what a dropped reference leaves."""
    numbers = (ctypes.c_int32 * ids.numel()).from_address(ids.data_ptr())
    return torch.frombuffer(numbers, dtype=torch.int32).view(ids.shape)


def check_keep_alive() -> None:
    """Ids that the caller drops right after routing are there when they are gathered."""
    capturer, pool = capturer_of(SHAPE), RecyclingPool()
    wanted = expected_ids(range(6), range(6), SHAPE)
    for layer in range(SHAPE.layers):
        logits = torch.zeros(6, SHAPE.experts)
        capturer.enter(layer, logits, 6)
        for first in (0, 4):
            capturer.hear(pool.put(wanted[first : first + 4, layer]), logits[first : first + 4])
        capturer.leave()
    assert np.array_equal(capturer.routes_RLK[:6].numpy(), wanted)
    capturer.begin()
    forgotten = [not block.any() for block in pool.blocks]
    assert not any(forgotten), "the eager gather may still be running on the device"


def check_poison() -> None:
    """A forward that ends early, or a replay without our gather, leaves no row of an earlier one."""
    loop = FakeLoop()
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    loop.land()
    loop.step([(request, 1)], Trouble(Run(skipped=(0, 1, 2, 3, 4)), "not captured"))
    assert [tuple(gap) for gap in loop.finish(request).gaps] == [(7, 8, "not captured")]


def check_positions() -> None:
    """Chunks of a prompt beside decoding requests land at their own positions."""
    loop = FakeLoop()
    one, two = loop.submit(PROMPT), loop.submit(range(100, 113))
    loop.step([(one, 7), (None, 2), (two, 6)])
    loop.step([(two, 7), (one, 1)])
    loop.land(2)
    loop.step([(one, 1), (None, 1), (two, 1)])
    assert loop.finish(one).complete
    assert loop.finish(two).complete


def check_first_pass_wins() -> None:
    """After a preemption the rows of kept tokens are those of the first pass."""
    for landed in (1, 2):
        loop = FakeLoop(staging_slots=6)
        request = loop.submit(PROMPT)
        loop.step([(request, 7)])
        loop.step([(request, 1)])
        loop.land(landed)
        loop.pause(request, drop=1)
        loop.resume(request)
        loop.step([(request, 7)])
        loop.step([(request, 1)])
        assert loop.finish(request).complete


def check_slot_reuse() -> None:
    """Rows in flight of a request that is gone never reach the next owner of its slot."""
    loop = FakeLoop()
    first = loop.submit(PROMPT)
    loop.step([(first, 7)])
    loop.recorder.release(first.track)
    second = loop.submit(range(50, 58))
    loop.step([(second, 2)])
    assert [tuple(gap) for gap in loop.finish(second).gaps] == [(2, 7, "absent")]


def check_snapshot() -> None:
    """Rows are right though the buffer is overwritten before the copy to the host runs."""
    loop = FakeLoop()
    request = loop.submit(PROMPT)
    for count in (3, 4, 1):
        loop.step([(request, count)])
    assert loop.finish(request).complete


def check_range() -> None:
    """An id outside [0, E) comes out as missing, not as another expert."""
    loop = FakeLoop()
    request = loop.submit(PROMPT)
    loop.step([(request, 7)], Trouble(outside=True))
    assert [tuple(gap) for gap in loop.finish(request).gaps] == [(0, 1, "out of range")]


def check_ring() -> None:
    """A step that finds no free slot is missing; the steps in flight keep theirs."""
    loop = FakeLoop(staging_slots=2)
    request = loop.submit(PROMPT)
    for count in (7, 1, 1):
        loop.step([(request, count)])
    assert [tuple(gap) for gap in loop.finish(request).gaps] == [(8, 9, "staging")]


def check_epochs() -> None:
    """Rows carry the epoch of their forward, not the one at their commit."""
    loop = FakeLoop()
    request = loop.submit(PROMPT)
    loop.step([(request, 7)])
    loop.recorder.epoch += 1
    assert loop.finish(request).epochs.tolist() == [0] * 6 + [0] * (len(request.tokens) - 7)
