"""Decode steps in graphs: real models, batch sizes, padding."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.checkpoints import tiny_deepseek_v3, tiny_mixtral, tiny_qwen3_moe, write_oracle_checkpoint  # noqa: E402
from support.model_runner import ModelRunner, record_routes  # noqa: E402
from tensorrt_llm._torch.pyexecutor.cpu_graph import CpuGraph  # noqa: E402
from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import (  # noqa: E402
    CUDA_GRAPH_DUMMY_REQUEST_ID,
    CUDAGraphRunner,
    CUDAGraphRunnerConfig,
)
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests  # noqa: E402
from tensorrt_llm._torch.utils import set_torch_compiling  # noqa: E402


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def _make_oracle(path: Path) -> str:
    write_oracle_checkpoint(path)
    return str(path)


@pytest.mark.parametrize("make", [_make_oracle, tiny_qwen3_moe, tiny_mixtral, tiny_deepseek_v3])
def test_a_model_decodes_in_a_graph_as_eagerly(make: Any, tmp_path: Path) -> None:
    path = make(tmp_path)
    eager, graphed = ModelRunner(path, moe_max_num_tokens=2), ModelRunner(path, moe_max_num_tokens=2)
    prompts = {0: [5, 6, 7], 1: list(range(20)), 2: [1]}
    tokens = eager.step(prompts).argmax(-1).tolist()
    assert graphed.step(prompts).argmax(-1).tolist() == tokens
    metadata = graphed.metadata.create_cuda_graph_metadata(3)
    ids, positions = torch.zeros(3, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
    graph, logits = CpuGraph(), torch.empty(0)
    for step in range(8):
        new = graphed.prepare({}, dict(enumerate(tokens)), metadata)
        ids.copy_(new[0])
        positions.copy_(new[1])
        if step == 0:
            with graph.record():
                logits = graphed.forward(ids, positions, metadata=metadata)
        graph.replay()
        expected = eager.step({}, dict(enumerate(tokens)))
        assert torch.equal(logits, expected)
        tokens = expected.argmax(-1).tolist()


def test_a_layer_behind_the_operator_for_compilers_is_recorded_itself(tmp_path: Path) -> None:
    runner = ModelRunner(tiny_qwen3_moe(tmp_path))
    calls = record_routes(runner.model)[0]
    logits = runner.step({0: [5, 6, 7]})
    metadata = runner.metadata.create_cuda_graph_metadata(1)
    ids, positions = runner.prepare({}, {0: int(logits.argmax())}, metadata)
    set_torch_compiling(True)
    try:
        graph = CpuGraph()
        before = len(calls)
        with graph.record():
            recorded = runner.forward(ids, positions, metadata=metadata)
    finally:
        set_torch_compiling(False)
    expected, seen = recorded.clone(), len(calls)
    assert seen > before
    graph.replay()
    assert torch.equal(recorded, expected)
    assert len(calls) == seen


class Metadata:
    """What the runner takes from attention metadata."""

    def __init__(self, size: int = 0) -> None:
        self.size, self.seq_lens = size, torch.ones(max(size, 1), dtype=torch.int32)
        self.made: list[int] = []

    def create_cuda_graph_metadata(self, size: int) -> Metadata:
        self.made.append(size)
        return Metadata(size)


class Cache:
    """A KV cache manager with some free blocks, and the resource manager around it."""

    def __init__(self, free: int = 4) -> None:
        self.free, self.dummies = free, 0

    def get_resource_manager(self, key: Any) -> Cache:
        assert key.value == "KV_CACHE_MANAGER"
        return self

    def get_num_free_blocks(self) -> int:
        return self.free

    def add_dummy_requests(self, ids: list[int], is_gen: bool = False) -> list[Any]:
        assert ids == [CUDA_GRAPH_DUMMY_REQUEST_ID]
        assert is_gen
        assert self.free
        self.free -= 1
        self.dummies += 1
        return [SimpleNamespace(is_cuda_graph_dummy=False)]

    def free_resources(self, request: Any) -> None:
        assert request.is_cuda_graph_dummy
        self.free += 1


def _runner(*sizes: int, padding: bool = True, batch_size: int = 8) -> CUDAGraphRunner:
    return CUDAGraphRunner(CUDAGraphRunnerConfig(sizes, padding, batch_size))


def _batch(generations: int, contexts: int = 0) -> ScheduledRequests:
    batch = ScheduledRequests()
    batch.context_requests = cast(Any, ["c"] * contexts)
    batch.generation_requests = cast(Any, ["g"] * generations)
    return batch


def _inputs(metadata: Any, first: int = 0) -> dict[str, Any]:
    ids = torch.arange(first, first + metadata.size, dtype=torch.int32)
    return {"input_ids": ids, "position_ids": (ids * 10).unsqueeze(0), "attn_metadata": metadata}


def test_the_runner_captures_after_two_eager_runs_and_replays_on_new_inputs() -> None:
    runner, base, calls = _runner(1, 2, 4), Metadata(), []

    def forward(inputs: dict[str, Any]) -> torch.Tensor:
        calls.append(inputs["attn_metadata"].size)
        assert inputs["attn_metadata"].seq_lens.tolist() == [1] * calls[-1]
        hidden = inputs["input_ids"] + 0
        return hidden + inputs["position_ids"][0]

    made = {}
    for size in (4, 2):
        metadata, key = made[size] = runner.maybe_get_cuda_graph(_batch(size), base)
        assert runner.needs_capture(key)
        runner.capture(key, forward, _inputs(metadata))
        assert not runner.needs_capture(key)
    assert calls == [4] * 3 + [2] * 3
    assert runner.graphs[made[4][1]].pool() is runner.graphs[made[2][1]].pool() is runner.get_graph_pool()
    for first in (5, 1):
        for metadata, key in made.values():
            expected = [11 * (first + row) for row in range(metadata.size)]
            assert runner.replay(key, _inputs(metadata, first)).tolist() == expected
    assert len(calls) == 6
    assert runner.maybe_get_cuda_graph(_batch(4), base) == made[4]
    assert base.made == [4, 2]
    with pytest.raises(AssertionError):
        runner.replay(made[2][1], _inputs(Metadata(2)))
    runner.clear()
    assert runner.needs_capture(made[4][1])
    assert runner.get_graph_pool() is None


def test_batches_that_no_graph_fits_run_eagerly() -> None:
    runner, base = _runner(1, 2, 4), Metadata()
    found = [runner.maybe_get_cuda_graph(_batch(size), base)[1] for size in (0, 1, 2, 3, 4, 5)]
    assert [key and key[0] for key in found] == [None, 1, 2, None, 4, None]
    assert runner.maybe_get_cuda_graph(_batch(1, contexts=1), base) == (None, None)
    assert not _runner().enabled
    assert _runner().maybe_get_cuda_graph(_batch(1), base) == (None, None)


def test_a_batch_is_padded_with_one_dummy_and_back_again() -> None:
    runner, cache, batch = _runner(1, 4, 8), Cache(), _batch(2)
    for _ in range(2):
        with runner.pad_batch(batch, cast(Any, cache)) as padded:
            assert padded is batch
            real, dummies = padded.generation_requests[:2], padded.generation_requests[2:]
            assert real == ["g", "g"]
            assert len(dummies) == 2
            assert dummies[0] is dummies[1]
            assert dummies[0].is_cuda_graph_dummy
        assert batch.generation_requests == ["g", "g"]
    with pytest.raises(KeyError), runner.pad_batch(batch, cast(Any, cache)):
        raise KeyError
    assert batch.generation_requests == ["g", "g"]


@pytest.mark.parametrize(
    ("options", "generations", "contexts", "free"),
    [
        ({}, 4, 0, 1),
        ({}, 9, 0, 1),
        ({}, 0, 0, 1),
        ({}, 2, 1, 1),
        ({"padding": False}, 2, 0, 1),
        ({"batch_size": 3}, 2, 0, 1),
        ({}, 2, 0, 0),
    ],
)
def test_a_batch_stays_as_it_is(options: Any, generations: int, contexts: int, free: int) -> None:
    cache, batch = cast(Any, Cache(free)), _batch(generations, contexts)
    with _runner(1, 4, 8, **options).pad_batch(batch, cache):
        assert batch.generation_requests == ["g"] * generations
    assert cache.dummies == 0
