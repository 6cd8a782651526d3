"""A pass is one run of all layers over the same rows; anything else is seen."""

from __future__ import annotations

import pytest
import torch
from support.flow_loop import FakeLoop
from support.flow_model import capturer_of, forward, layer_forward
from support.flow_oracle import Shape, expected_ids

from trtllm_r3.errors import RoutesMismatch
from trtllm_r3.flow.payload import Payload, pack_none, unpack

SHAPE = Shape()


def ids_of(rows: int) -> torch.Tensor:
    return torch.from_numpy(expected_ids(range(40, 40 + rows), range(rows), SHAPE, 0))


@pytest.mark.parametrize("mode", ["step", "layer"])
def test_a_layer_with_fewer_rows_than_the_others_is_missing_and_named(mode: str) -> None:
    capturer, ids = capturer_of(SHAPE, mode), ids_of(8)
    capturer.begin()
    for layer in range(SHAPE.layers):
        part = ids[4:, layer] if layer == 2 else ids[:, layer]
        layer_forward(capturer, layer, part.clone(), len(part))
    assert list(capturer.uncovered) == [2]
    assert "4 rows where the layers before it got 8" in capturer.uncovered[2]
    assert (capturer.routes_RLK[:8, 2] == capturer.poison).all()
    others = [layer for layer in range(SHAPE.layers) if layer != 2]
    assert torch.equal(capturer.routes_RLK[:8, others].to(torch.int32), ids[:, others].to(torch.int32))


def test_a_forward_cut_into_several_passes_commits_nothing() -> None:
    loop = FakeLoop()
    recorder = loop.recorder
    track = recorder.open(start=0, position=0)
    recorder.begin_step([track.slot], [0], [8])
    for first in (0, 4):
        forward(recorder.capturer, ids_of(8)[first : first + 4])
    recorder.end_step()
    routes = unpack(recorder.finish(track, num_tokens=9, generated=1), 1)
    assert [(gap.start, gap.stop, gap.cause) for gap in routes.gaps] == [(0, 8, "layout")]


def test_what_one_warm_up_forward_showed_is_not_forgotten_by_the_next() -> None:
    capturer = capturer_of(SHAPE)
    capturer.checking = True
    capturer.begin()
    for layer in range(SHAPE.layers):
        rows = 3 if layer == 1 else 4
        layer_forward(capturer, layer, ids_of(rows)[:, layer].clone(), rows)
    capturer.begin()
    forward(capturer, ids_of(2))
    assert list(capturer.uncovered) == [1]


def test_the_buffer_keeps_its_address() -> None:
    capturer = capturer_of(SHAPE)
    before = capturer.routes_RLK.data_ptr()
    for rows in (1, SHAPE.max_rows, 3):
        capturer.begin()
        forward(capturer, ids_of(rows))
    assert capturer.routes_RLK.data_ptr() == before


def test_a_payload_of_another_format_is_refused_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_r3.flow.payload.VERSION", 9)
    payload = pack_none("because", {})
    monkeypatch.undo()
    with pytest.raises(RoutesMismatch, match="expected format 1, found 9"):
        unpack(Payload(None, payload.meta), 0)
