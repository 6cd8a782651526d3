"""Memory of graphs: recycled and overwritten when nobody refers to it, never before."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

import trtllm_r3.standin

trtllm_r3.standin.install()

from tensorrt_llm._torch.pyexecutor.cpu_graph import CpuGraph, CpuGraphPool  # noqa: E402


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def _peek(tensor: torch.Tensor) -> Any:
    """The memory of a float32 tensor, held by nobody, as one reads a released buffer."""
    return np.frombuffer((ctypes.c_byte * (tensor.numel() * 4)).from_address(tensor.data_ptr()), np.float32)


def test_a_dropped_result_is_poisoned_and_its_memory_given_to_the_next() -> None:
    x, graph = torch.ones(200), CpuGraph()
    with graph.record():
        dropped = x + 1
        memory, place = _peek(dropped), dropped.data_ptr()
        assert memory[0] == 2
        del dropped
        x.add_(0)
        assert set(memory.view(np.uint8)) == {0x7F}
        after = x + 5
        assert after.data_ptr() == place
    graph.replay()
    assert memory[0] == after[0] == 6


def test_a_kept_result_is_never_reused_and_stays_right_at_each_replay() -> None:
    x, pool, kept = torch.ones(200), CpuGraphPool(), []
    graphs = [CpuGraph(pool), CpuGraph(pool)]
    for graph in graphs:
        with graph.record():
            base = x + 1
            kept.append(base.view(10, 20)[3])
            del base
            for _ in range(3):
                last = x * 7
    del last
    for value, graph, row in zip((1, 4), graphs, kept, strict=True):
        x.fill_(value)
        graph.replay()
        assert row.tolist() == [value + 1.0] * 20
    assert kept[0][0] == 2


def test_graphs_of_a_pool_share_the_memory_that_is_free() -> None:
    x, pool = torch.ones(300), CpuGraphPool()
    first, second, apart = CpuGraph(pool), CpuGraph(pool), CpuGraph()
    assert first.pool() is second.pool() is pool
    with first.record():
        hidden = x + 1
        memory, place = _peek(hidden), hidden.data_ptr()
        out = hidden * 2
        del hidden
    assert set(memory.view(np.uint8)) == {0x7F}
    with apart.record():
        assert (x + 1).data_ptr() != place
    with second.record():
        other = x + 10
        assert other.data_ptr() == place
    first.replay()
    second.replay()
    assert out[0] == 4
    assert other[0] == memory[0] == 11
    first.replay()
    assert out[0] == 4
    assert set(memory.view(np.uint8)) == {0x7F}


def test_outputs_are_valid_until_the_next_replay() -> None:
    x, graph = torch.zeros(3), CpuGraph()
    with graph.record():
        out = (x + 1) * 2
    for step in range(3):
        x.fill_(step)
        graph.replay()
        x.fill_(-1)
        assert out.tolist() == [2.0 * step + 2] * 3


def test_memory_that_nothing_was_written_to_is_garbage() -> None:
    with CpuGraph().record():
        raw = torch.empty(4, dtype=torch.uint8)
    assert raw.tolist() == [0x7F] * 4


def test_a_weak_result_shows_its_memory_without_holding_it() -> None:
    x, graph = torch.ones(100), CpuGraph()
    with graph.record():
        out = [x + 1, x]
    weak = graph.weak(out)
    del out
    assert weak[1] is x
    assert weak[0].view(torch.uint8).tolist() == [0x7F] * 400
    graph.replay()
    assert weak[0].tolist() == [2.0] * 100
