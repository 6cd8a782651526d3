"""The two custom ops: well-formed, traceable, and what a graph replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.flow_model import Run, capturer_of, forward
from support.flow_oracle import Shape, expected_ids
from torch.utils._python_dispatch import TorchDispatchMode

from trtllm_r3.flow import ops
from trtllm_r3.flow.capturer import RouteCapturer

SHAPE = Shape()


def ids_of(rows: int, nonce: int = 0) -> torch.Tensor:
    return torch.from_numpy(expected_ids(range(rows), range(rows), SHAPE, nonce))


def buffer(dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(SHAPE.max_rows, SHAPE.layers, SHAPE.top_k, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_the_op_of_one_layer_passes_opcheck(dtype: torch.dtype) -> None:
    torch.library.opcheck(ops.capture_layer, (buffer(dtype), ids_of(4)[:, 1], 1, 2, SHAPE.experts))


def test_the_op_of_a_step_passes_opcheck() -> None:
    ids = list(ids_of(4).unbind(1))
    witness = torch.zeros(SHAPE.max_rows, SHAPE.top_k, dtype=torch.uint8)
    args = (buffer(), ids, list(range(5)), [2] * 5, witness, 3, SHAPE.experts)
    torch.library.opcheck(ops.capture_step, args)


def test_compiled_code_writes_through_the_op_of_one_layer() -> None:
    def layer(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ids = x.topk(SHAPE.top_k).indices.to(torch.int32)
        ops.capture_layer(out, ids, 2, 1, SHAPE.experts)
        return x * 2

    x, out = torch.rand(4, SHAPE.experts), buffer()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x, out)
    assert torch.equal(out[1:5, 2].long(), x.topk(SHAPE.top_k).indices)
    assert int(out.count_nonzero()) == int(out[1:5, 2].count_nonzero())


class Recording(TorchDispatchMode):
    """Logs dispatched ops with the tensors they used, and runs only those again: a CUDA graph on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.log.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.log:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(out: Any) -> list[torch.Tensor]:
    parts = out if isinstance(out, (list, tuple)) else [out]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def record(capturer: RouteCapturer, ids: torch.Tensor, run: Run) -> Recording:
    with Recording() as recording:
        forward(capturer, ids, run)
    return recording


@pytest.mark.parametrize("mode", ["step", "layer"])
@pytest.mark.parametrize("run", [Run(), Run(chunk=2, chunk_order=2), Run(padding=3)], ids=repr)
def test_a_replay_that_runs_no_python_of_ours_writes_the_rows_of_its_new_inputs(mode: str, run: Run) -> None:
    capturer, ids = capturer_of(SHAPE, mode), ids_of(6)
    capturer.checking = True
    recording, passes = record(capturer, ids, run), capturer.passes
    for nonce in (1, 2):
        ids.copy_(ids_of(6, nonce))
        capturer.routes_RLK.fill_(capturer.poison)
        recording.replay()
        assert torch.equal(capturer.routes_RLK[:6].to(torch.int32), ids_of(6, nonce))
    assert capturer.passes == passes


def test_graphs_of_two_sizes_replayed_in_turn_write_their_own_rows() -> None:
    capturer, large, small = capturer_of(SHAPE), ids_of(8), ids_of(2)
    graphs = [(large, record(capturer, large, Run())), (small, record(capturer, small, Run(padding=2)))]
    for nonce, (ids, graph) in enumerate([*graphs, *graphs[::-1]], 1):
        ids.copy_(ids_of(len(ids), nonce))
        capturer.routes_RLK.fill_(capturer.poison)
        graph.replay()
        assert torch.equal(capturer.routes_RLK[: len(ids)].to(torch.int32), ids_of(len(ids), nonce))


def test_a_graph_recorded_while_a_layer_was_silent_leaves_the_poison_at_each_replay() -> None:
    capturer, ids = capturer_of(SHAPE), ids_of(4)
    recording = record(capturer, ids, Run(silent=(2,)))
    forward(capturer, ids_of(4, nonce=9))
    capturer.routes_RLK.fill_(capturer.poison)
    recording.replay()
    assert (capturer.routes_RLK[:4, 2] == capturer.poison).all()


def test_ids_chosen_in_inference_mode_are_captured_outside_and_inside_of_it() -> None:
    capturer = capturer_of(SHAPE)
    with torch.inference_mode():
        forward(capturer, ids_of(4) + 0)
    first = capturer.routes_RLK[:4].to(torch.int32)
    capturer.routes_RLK[:4].fill_(capturer.poison)
    forward(capturer, ids_of(4, nonce=1))
    assert torch.equal(first, ids_of(4))
    assert torch.equal(capturer.routes_RLK[:4].to(torch.int32), ids_of(4, nonce=1))
