"""From router calls to the device buffer: chunks, coverage, passes."""

from __future__ import annotations

import pytest
import torch
from support.flow_model import Run, capturer_of, forward, layer_forward
from support.flow_oracle import Shape, expected_ids

from trtllm_r3.flow.capturer import RouteCapturer
from trtllm_r3.flow.ops import CHANGED, OUT_OF_RANGE, mark

SHAPE = Shape()
MODES = pytest.mark.parametrize("mode", ["step", "layer"])


def ids_of(rows: int, nonce: int = 0, shape: Shape = SHAPE) -> torch.Tensor:
    return torch.from_numpy(expected_ids(range(40, 40 + rows), range(rows), shape, nonce))


def rows_of(capturer: RouteCapturer, rows: int) -> torch.Tensor:
    return capturer.routes_RLK[:rows].to(torch.int32)


def missing(capturer: RouteCapturer, rows: int) -> list[list[int]]:
    """For each row the layers that hold the mark of ids not captured."""
    marked = (capturer.routes_RLK[:rows] == capturer.poison).all(-1)
    return [torch.nonzero(row).flatten().tolist() for row in marked]


GOOD_RUNS = [
    Run(),
    Run(chunk=3),
    Run(chunk=2, chunk_order=2),
    Run(chunk=4, chunk_order=-1),
    Run(chunk=4, rerun_first=True),
    Run(padding=5),
    Run(foreign=4),
    Run(chunk=4, foreign=7),
]


@MODES
@pytest.mark.parametrize("run", GOOD_RUNS, ids=repr)
@pytest.mark.parametrize("rows", [0, 1, 10])
def test_every_row_is_written_however_the_layer_is_cut(mode: str, run: Run, rows: int) -> None:
    capturer = capturer_of(SHAPE, mode)
    forward(capturer, ids_of(rows), run)
    assert torch.equal(rows_of(capturer, rows), ids_of(rows))
    assert capturer.uncovered == {}
    assert capturer.passes == 1


@MODES
def test_rows_of_other_ranks_are_not_written(mode: str) -> None:
    capturer = capturer_of(SHAPE, mode)
    forward(capturer, ids_of(3), Run(foreign=4))
    assert missing(capturer, 7)[3:] == [[0, 1, 2, 3, 4]] * 4


@pytest.mark.parametrize(
    "run", [*GOOD_RUNS, Run(silent=(2,)), Run(twice=(3,)), Run(copies=True, chunk=3)], ids=repr
)
def test_both_modes_fill_the_buffer_alike(run: Run) -> None:
    step, layer = capturer_of(SHAPE, "step"), capturer_of(SHAPE, "layer")
    for capturer in (step, layer):
        forward(capturer, ids_of(9), run)
    assert torch.equal(rows_of(step, 9), rows_of(layer, 9))
    assert step.uncovered == layer.uncovered


@MODES
@pytest.mark.parametrize("whole", [0, 10], ids=["short", "same rows again"])
def test_chunks_whose_logits_are_copies_leave_the_layer_missing_and_named(mode: str, whole: int) -> None:
    capturer = capturer_of(SHAPE, mode)
    for layer in range(SHAPE.layers):
        run = Run(copies=True, chunk=whole or 4, rerun_first=bool(whole)) if layer == 3 else Run()
        layer_forward(capturer, layer, ids_of(10)[:, layer], 10, run)
    assert list(capturer.uncovered) == [3]
    assert missing(capturer, 10) == [[3]] * 10


@MODES
def test_a_copy_of_all_logits_is_as_good_as_the_logits(mode: str) -> None:
    capturer = capturer_of(SHAPE, mode)
    forward(capturer, ids_of(6), Run(copies=True))
    assert torch.equal(rows_of(capturer, 6), ids_of(6))


@MODES
def test_logits_in_the_middle_of_a_larger_storage_count_from_their_own_first_row(mode: str) -> None:
    capturer, ids = capturer_of(SHAPE, mode), ids_of(6)
    for layer in range(SHAPE.layers):
        logits = torch.zeros(20, 2 * SHAPE.experts)[7:13, : SHAPE.experts]
        capturer.enter(layer, logits, 6)
        for part in torch.arange(6).split(4):
            capturer.hear(ids[part, layer], logits[part[0] : part[-1] + 1])
        capturer.leave()
    assert torch.equal(rows_of(capturer, 6), ids)


@MODES
@pytest.mark.parametrize("run", [Run(silent=(2,)), Run(skipped=(2,))], ids=["silent", "skipped"])
def test_a_layer_that_never_reports_is_missing_and_named(mode: str, run: Run) -> None:
    capturer = capturer_of(SHAPE, mode)
    for _ in range(2):
        forward(capturer, ids_of(5), run)
    assert list(capturer.uncovered) == [2]
    assert all(2 in layers for layers in missing(capturer, 5))


@MODES
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_layer_that_runs_twice_in_a_pass_is_missing_and_named(mode: str, layer: int) -> None:
    capturer = capturer_of(SHAPE, mode)
    capturer.begin()
    forward(capturer, ids_of(5), Run(twice=(layer,)))
    assert list(capturer.uncovered) == [layer]
    assert missing(capturer, 5) == [[layer]] * 5


@MODES
def test_a_good_pass_clears_the_name_of_a_layer(mode: str) -> None:
    capturer = capturer_of(SHAPE, mode)
    forward(capturer, ids_of(5), Run(silent=(1,)))
    forward(capturer, ids_of(5, nonce=2))
    assert capturer.uncovered == {}
    assert torch.equal(rows_of(capturer, 5), ids_of(5, nonce=2))


@MODES
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("stop_before", [2, 4])
def test_a_pass_that_was_aborted_leaves_no_id_to_the_next(mode: str, stop_before: int, told: bool) -> None:
    capturer = capturer_of(SHAPE, mode)
    with pytest.raises(RuntimeError, match="out of memory"):
        forward(capturer, ids_of(8, nonce=1), Run(stop_before=stop_before))
    if told:
        capturer.begin()
    forward(capturer, ids_of(6, nonce=2))
    assert torch.equal(rows_of(capturer, 6), ids_of(6, nonce=2))
    assert capturer.uncovered == {}


def test_a_layer_that_raised_midway_does_not_count_as_covered() -> None:
    capturer = capturer_of(SHAPE)
    for layer in range(SHAPE.layers):
        if layer == 2:
            capturer.enter(2, torch.zeros(4, SHAPE.experts), 4)
        else:
            layer_forward(capturer, layer, ids_of(4)[:, layer], 4)
    assert missing(capturer, 4) == [[2]] * 4


@MODES
def test_the_first_layer_run_again_in_mid_pass_leaves_the_rows_missing(mode: str) -> None:
    capturer = capturer_of(SHAPE, mode)
    for layer in (0, 1, 0, 2, 3, 4):
        layer_forward(capturer, layer, ids_of(4)[:, layer], 4)
    assert all(layers for layers in missing(capturer, 4))


@MODES
def test_several_passes_of_one_forward_end_with_the_last(mode: str) -> None:
    capturer = capturer_of(SHAPE, mode)
    for nonce in (1, 2, 3):
        forward(capturer, ids_of(6, nonce))
    assert capturer.passes == 3
    assert torch.equal(rows_of(capturer, 6), ids_of(6, nonce=3))


def test_a_pass_in_which_a_hook_failed_gathers_nothing() -> None:
    capturer = capturer_of(SHAPE)
    layer_forward(capturer, 0, ids_of(4)[:, 0], 4)
    capturer.void()
    for layer in range(1, SHAPE.layers):
        layer_forward(capturer, layer, ids_of(4)[:, layer], 4)
    assert (capturer.passes, capturer.void_passes) == (1, 1)
    assert missing(capturer, 4) == [[0, 1, 2, 3, 4]] * 4


def test_a_router_asked_outside_of_any_layer_is_not_heard() -> None:
    capturer = capturer_of(SHAPE)
    capturer.hear(ids_of(4)[:, 0], torch.zeros(4, SHAPE.experts))
    capturer.leave()
    forward(capturer, ids_of(4))
    assert torch.equal(rows_of(capturer, 4), ids_of(4))


@MODES
@pytest.mark.parametrize("shape", [(4, 2), (4, 4), (3, 3), (4,)], ids=str)
def test_ids_of_another_shape_are_refused_and_the_shape_named(mode: str, shape: tuple[int, ...]) -> None:
    capturer = capturer_of(SHAPE, mode)
    for layer in range(SHAPE.layers):
        ids = torch.zeros(shape, dtype=torch.int32) if layer == 1 else ids_of(4)[:, layer]
        logits = torch.zeros(4, SHAPE.experts)
        capturer.enter(layer, logits, 4)
        capturer.hear(ids, logits)
        capturer.leave()
    assert f"{tuple(shape)}, not [4, 3]" in capturer.uncovered[1]
    assert missing(capturer, 4) == [[1]] * 4


@MODES
def test_a_call_that_does_not_fit_the_buffer_writes_nothing(mode: str) -> None:
    capturer = capturer_of(SHAPE, mode)
    forward(capturer, ids_of(SHAPE.max_rows + 1))
    assert missing(capturer, SHAPE.max_rows) == [[0, 1, 2, 3, 4]] * SHAPE.max_rows
    forward(capturer, ids_of(SHAPE.max_rows))
    assert torch.equal(rows_of(capturer, SHAPE.max_rows), ids_of(SHAPE.max_rows))


@MODES
def test_two_capturers_interleaved_hear_their_own_layers_only(mode: str) -> None:
    one, two = capturer_of(SHAPE, mode), capturer_of(SHAPE, mode)
    for layer in range(SHAPE.layers):
        layer_forward(one, layer, ids_of(5, nonce=1)[:, layer], 5)
        layer_forward(two, layer, ids_of(7, nonce=2)[:, layer], 7)
    assert torch.equal(rows_of(one, 5), ids_of(5, nonce=1))
    assert torch.equal(rows_of(two, 7), ids_of(7, nonce=2))


@pytest.mark.parametrize(
    ("experts", "top_k", "dtype"),
    [(256, 3, torch.uint8), (257, 3, torch.int16), (256, 1, torch.int16), (11, 1, torch.int16)],
)
@MODES
def test_the_narrow_type_holds_every_id(mode: str, experts: int, top_k: int, dtype: torch.dtype) -> None:
    shape = Shape(experts=experts, top_k=top_k)
    capturer, ids = capturer_of(shape, mode), ids_of(6, shape=shape)
    ids[0, :, 0] = experts - 1
    ids[0, :, 1:] = torch.arange(top_k - 1, dtype=torch.int32)
    forward(capturer, ids)
    assert capturer.routes_RLK.dtype == dtype
    assert torch.equal(rows_of(capturer, 6), ids)


@pytest.mark.parametrize("bad", [-1, -256, 256, 257, 511, 65536, 2**31 - 1])
@pytest.mark.parametrize("top_k", [1, 3])
@MODES
def test_an_id_outside_the_experts_is_marked_and_never_wraps(mode: str, top_k: int, bad: int) -> None:
    shape = Shape(experts=256, top_k=top_k)
    capturer, ids = capturer_of(shape, mode), ids_of(5, shape=shape)
    ids[2, 4, top_k - 1] = bad
    forward(capturer, ids)
    wanted = ids.clone()
    wanted[2, 4] = mark(OUT_OF_RANGE, top_k)
    assert torch.equal(rows_of(capturer, 5), wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_ids_may_come_in_any_integer_type(dtype: torch.dtype) -> None:
    capturer = capturer_of(SHAPE)
    forward(capturer, ids_of(5).to(dtype))
    assert torch.equal(rows_of(capturer, 5), ids_of(5))


def passes_with_a_late_write(capturer: RouteCapturer, passes: int, layer: int) -> None:
    """Layer `layer` shifts the ids of its second row after routing, as a remap to slots would."""
    for _ in range(passes):
        for at in range(SHAPE.layers):
            logits, ids = torch.zeros(4, SHAPE.experts), ids_of(4)[:, at].clone()
            capturer.enter(at, logits, 4)
            capturer.hear(ids, logits)
            capturer.leave() if at != layer or at < SHAPE.layers - 1 else None
            if at == layer:
                ids[1] = (ids[1] + 1) % SHAPE.experts
        if layer == SHAPE.layers - 1:
            capturer.leave()


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_layer_that_writes_to_its_ids_is_captured_singly_once_warm_up_saw_it(layer: int) -> None:
    capturer = capturer_of(SHAPE)
    capturer.checking = True
    passes_with_a_late_write(capturer, 1, layer)
    capturer.checking = False
    assert capturer.by_layer == {layer}
    passes_with_a_late_write(capturer, 1, layer)
    assert torch.equal(rows_of(capturer, 4), ids_of(4))


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_late_write_that_warm_up_did_not_see_is_caught_when_the_layer_is_the_witness(layer: int) -> None:
    capturer = capturer_of(SHAPE)
    passes_with_a_late_write(capturer, layer + 1, layer)
    wanted = ids_of(4)
    wanted[1, layer] = mark(CHANGED, SHAPE.top_k)
    assert torch.equal(rows_of(capturer, 4), wanted)
