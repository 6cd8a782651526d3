"""The loop: its order of steps, what it launches, and that nobody waits in vain whatever happens."""

from __future__ import annotations

import datetime as dt
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.checkpoints import write_oracle_checkpoint  # noqa: E402
from support.loop import answers, arguments, enqueue, executor, request, tokens_of, watched  # noqa: E402
from support.oracle import expected_continuation  # noqa: E402
from support.rollouts import prompts  # noqa: E402
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor  # noqa: E402
from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor  # noqa: E402
from tensorrt_llm._torch.pyexecutor.resource_manager import BaseResourceManager  # noqa: E402
from tensorrt_llm.bindings.executor import FinishReason  # noqa: E402

STATIONS = [
    "_prepare_and_schedule_batch",
    "_handle_control_request",
    "_pause_requests",
    "_forward_step",
    "_sample_async",
    "_update_request_states",
    "_update_requests",
    "_handle_canceled_requests",
    "_handle_responses",
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path: Path = tmp_path_factory.mktemp("oracle")
    return str(path), write_oracle_checkpoint(path)


@pytest.fixture(params=[True, False], ids=["plain", "overlap"])
def running(request: pytest.FixtureRequest, oracle: tuple[str, dict[str, Any]]) -> Iterator[PyExecutor]:
    with executor(oracle[0], disable_overlap_scheduler=request.param) as built:
        yield built


class Watcher(BaseResourceManager):
    """Logs what the loop asks of a manager."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def get_max_resource_count(self) -> int:
        return 1 << 30

    def get_needed_resource_to_completion(self, request: Any) -> int:
        return 0

    def prepare_resources(self, scheduled_batch: Any) -> None:
        self.log.append("prepare_resources")

    def update_resources(self, scheduled_batch: Any) -> None:
        self.log.append("update_resources")

    def free_resources(self, request: Any) -> None:
        self.log.append("free_resources")


def trace(running: PyExecutor, max_tokens: int, **options: Any) -> list[str]:
    """Stations that the loop passes for one request alone, without idle rounds before and after."""
    log: list[Any] = []
    running.resource_manager.resource_managers["watcher"] = Watcher(log)
    with watched(running, STATIONS, log):
        answers(running, enqueue(running, [request([5, 6, 7], max_tokens, **options)]))
        with running.control_action():
            pass
    del running.resource_manager.resource_managers["watcher"]
    first, last = log.index("prepare_resources"), len(log) - log[::-1].index("update_resources")
    return log[first:last]


# ---- order ----


def test_the_plain_loop_finishes_a_step_before_the_next(oracle: tuple[str, dict[str, Any]]) -> None:
    step = ["prepare_resources", *STATIONS[3:], "update_resources"]
    last = [*step[:-1], "free_resources", "update_resources"]
    with executor(oracle[0], disable_overlap_scheduler=True) as running:
        assert trace(running, 2) == [*step, *STATIONS[:3], *last]


def test_the_overlap_loop_launches_a_step_before_it_reads_the_last(
    oracle: tuple[str, dict[str, Any]],
) -> None:
    launch = ["prepare_resources", "_forward_step"]
    advance = ["_sample_async", "_update_request_states"]
    answer = ["_handle_canceled_requests", "_handle_responses"]
    with executor(oracle[0]) as running:
        assert trace(running, 2) == [
            *launch, *advance, *answer,
            *STATIONS[:3], *launch, "_update_requests", *advance, *answer, "update_resources",
            *STATIONS[:3], "_update_requests", *answer, "free_resources", "update_resources",
        ]  # fmt: skip


@pytest.mark.parametrize(("end", "launched"), [("length", 4), ("end id", 5), ("stop word", 5)])
def test_overlap_launches_one_step_too_many_unless_the_length_ends_it(
    oracle: tuple[str, dict[str, Any]], end: str, launched: int
) -> None:
    path, config = oracle
    prompt = [5, 6, 7, 8]
    tokens = expected_continuation(prompt, 4, config)
    assert len(set(tokens)) == 4
    options: dict[str, Any] = {
        "length": {"max_tokens": 4},
        "end id": {"max_tokens": 9, "end_id": tokens[3]},
        "stop word": {"max_tokens": 9, "stop_words": [tokens[2:]]},
    }[end]
    log: list[Any] = []
    with executor(path) as running, watched(running, ["_forward_step"], log):
        assert tokens_of(running, [request(prompt, **options)]) == [tokens]
        with running.control_action():
            assert len(log) == launched


def test_a_request_is_answered_before_its_resources_are_freed_last_manager_first(running: PyExecutor) -> None:
    log: list[Any] = []
    managers = running.resource_manager.resource_managers
    for name in ("one", "two"):
        managers[name] = Watcher(log)
        managers[name].free_resources = lambda request, name=name: log.append(name)  # type: ignore[union-attr,method-assign]
    with watched(running, ["_enqueue_responses"], log, lambda name, args: [r for r, _ in args[0]]):
        (request_id,) = enqueue(running, [request([5, 6], 1)])
        answers(running, [request_id])
        with running.control_action():
            assert [entry for entry in log if entry in ([request_id], "one", "two")] == [
                [request_id], "two", "one",
            ]  # fmt: skip


# ---- results ----

CELLS = list(itertools.product([True, False], [(), (1, 3, 8)], ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]))


@pytest.mark.parametrize(("plain", "graphs", "policy"), CELLS)
def test_tokens_do_not_depend_on_how_requests_are_run(
    oracle: tuple[str, dict[str, Any]], plain: bool, graphs: tuple[int, ...], policy: str
) -> None:
    path, config = oracle
    shared = prompts(1, longest=90, vocab=97, seed=3)[0]
    asked = [*prompts(14, longest=100, vocab=97), shared, shared, [*shared, 4]]
    counts = [1 + 5 * i % 23 for i in range(len(asked))]
    options = {"disable_overlap_scheduler": plain, "graphs": graphs, "policy": policy}
    with executor(path, kv_tokens=320, **options) as running:
        for _ in range(2):
            got = tokens_of(running, [request(p, c) for p, c in zip(asked, counts, strict=True)])
            assert got == [expected_continuation(p, c, config) for p, c in zip(asked, counts, strict=True)]
        manager = running.kv_cache_manager
        with running.control_action():
            assert manager.num_free_blocks == manager.blocks_in_primary_pool
            assert not manager.impl.sequences


@pytest.mark.parametrize("plain", [True, False])
def test_a_paused_request_goes_on_where_it_was(oracle: tuple[str, dict[str, Any]], plain: bool) -> None:
    path, config = oracle
    asked = prompts(6, longest=40, vocab=97, seed=5)
    paused: list[int] = []
    options: dict[str, Any] = {"policy": "MAX_UTILIZATION", "kv_tokens": 128, "reuse": False}
    with executor(path, disable_overlap_scheduler=plain, **options) as running:
        noted = watched(running, ["_pause_requests"], paused, lambda _, args: len(args[0]))
        with noted:
            got = tokens_of(running, [request(p, 50, streaming=i % 2 == 1) for i, p in enumerate(asked)])
        assert sum(paused) > 2
    assert got == [expected_continuation(p, 50, config) for p in asked]


def test_static_batches_do_not_mix(oracle: tuple[str, dict[str, Any]]) -> None:
    path, config = oracle
    asked = prompts(6, longest=20, vocab=97)
    sizes: list[Any] = []
    with executor(path, policy="STATIC_BATCH", max_batch_size=4) as running:
        note = watched(
            running, ["_forward_step"], sizes,
            lambda _, args: (len(args[0].context_requests), len(args[0].generation_requests)),
        )  # fmt: skip
        with note:
            got = tokens_of(running, [request(p, 6) for p in asked])
    assert got == [expected_continuation(p, 6, config) for p in asked]
    assert [size for size in sizes if size[0]] == [(4, 0), (2, 0)]


@pytest.mark.parametrize("policy", ["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"])
def test_prompts_are_chunked_by_blocks(oracle: tuple[str, dict[str, Any]], policy: str) -> None:
    from tensorrt_llm.llmapi import ContextChunkingPolicy, SchedulerConfig

    path, config = oracle
    asked = [list(range(3, 90)), list(range(10, 60))]
    chunks: list[Any] = []
    chosen = SchedulerConfig(context_chunking_policy=ContextChunkingPolicy[policy])
    with executor(path, max_num_tokens=32, scheduler_config=chosen) as running:
        noted = watched(
            running, ["_forward_step"], chunks,
            lambda _, args: [r.context_chunk_size for r in args[0].context_requests],
        )  # fmt: skip
        with noted:
            got = tokens_of(running, [request(p, 3) for p in asked])
    assert got == [expected_continuation(p, 3, config) for p in asked]
    chunks = [sizes for sizes in chunks if sizes]
    assert sum(map(sum, chunks)) == 137
    assert chunks[0] == ([32] if policy == "FIRST_COME_FIRST_SERVED" else [16, 16])


def test_children_are_sequences_of_their_own_with_one_answer_each(running: PyExecutor) -> None:
    (responses,) = answers(
        running, enqueue(running, [request([5, 6, 7], 6, num_return_sequences=3, seed=4, temperature=1.0)])
    )
    results = [response.result for response in responses]
    assert sorted(result.sequence_index for result in results) == [0, 1, 2]
    assert all(result.is_sequence_final for result in results)
    assert [result.is_final for result in results] == [False, False, True]
    tokens = {tuple(result.output_token_ids[0]) for result in results}
    assert len(tokens) == 3
    alone = tokens_of(running, [request([5, 6, 7], 6, seed=4 + i, temperature=1.0) for i in range(3)])
    assert tokens == set(map(tuple, alone))


def test_a_stream_brings_each_token_once(running: PyExecutor, oracle: tuple[str, dict[str, Any]]) -> None:
    (responses,) = answers(running, enqueue(running, [request([8, 9], 5, streaming=True)]))
    results = [response.result for response in responses]
    tokens = [token for result in results for token in result.output_token_ids[0]]
    assert tokens == expected_continuation([8, 9], 5, oracle[1])
    assert len(results) >= 4
    assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]
    assert results[-1].finish_reasons == [FinishReason.LENGTH]


def test_a_second_request_finds_prompt_and_answer_of_the_first(
    running: PyExecutor, oracle: tuple[str, dict[str, Any]]
) -> None:
    prompt = list(range(20, 40))
    (tokens,) = tokens_of(running, [request(prompt, 20)])
    (responses,) = answers(running, enqueue(running, [request([*prompt, *tokens, 3, 4], 2)]))
    assert responses[0].result.cached_tokens == 39
    running.reset_prefix_cache()
    (responses,) = answers(running, enqueue(running, [request([*prompt, *tokens, 3, 4], 2)]))
    assert responses[0].result.cached_tokens == 0


@pytest.mark.parametrize("plain", [True, False])
def test_each_position_is_computed_once_in_order(oracle: tuple[str, dict[str, Any]], plain: bool) -> None:
    rows: dict[int, list[int]] = {}
    with executor(oracle[0], disable_overlap_scheduler=plain, reuse=False, max_num_tokens=32) as running:
        original = running.model_engine.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            metadata = running.model_engine.attn_metadata  # type: ignore[attr-defined]
            first = metadata.kv_cache_params.num_cached_tokens_per_seq
            for request_id, begin, count in zip(
                metadata.request_ids, first, metadata.seq_lens.tolist(), strict=True
            ):
                rows.setdefault(request_id, []).extend(range(begin, begin + count))
            return outputs

        running.model_engine.forward = noting  # type: ignore[method-assign]
        asked = prompts(9, longest=70, vocab=97)
        ids = enqueue(running, [request(p, 1 + i) for i, p in enumerate(asked)])
        answers(running, ids)
    assert rows == {
        request_id: list(range(len(p) + i)) for i, (request_id, p) in enumerate(zip(ids, asked, strict=True))
    }


# ---- faults ----


def test_a_failed_forward_fails_all_active_requests_and_the_loop_goes_on(
    running: PyExecutor, oracle: tuple[str, dict[str, Any]]
) -> None:
    forward, calls = running.model_engine.forward, itertools.count()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("out of luck")
        return forward(*args, **kwargs)

    running.model_engine.forward = failing  # type: ignore[method-assign]
    found = answers(running, enqueue(running, [request([5, 6], 9), request([7, 8, 9], 9)]))
    assert [responses[-1].error_msg for responses in found] == ["out of luck"] * 2
    assert tokens_of(running, [request([5, 6], 4)]) == [expected_continuation([5, 6], 4, oracle[1])]
    with running.control_action():
        assert not running.kv_cache_manager.impl.sequences


def test_a_bad_request_fails_alone(running: PyExecutor, oracle: tuple[str, dict[str, Any]]) -> None:
    bad = [request([3, 97], 4), request([4] * 300, 4), request([5, 6], 4, beam_width=2)]
    found = answers(running, enqueue(running, [*bad, request([5, 6], 4)]))
    texts = [responses[-1].error_msg or "" for responses in found]
    assert "outside of [0, 97)" in texts[0]
    assert "max_seq_len is 256" in texts[1]
    assert "beam_width=2" in texts[2]
    assert found[3][-1].result.output_token_ids[0] == expected_continuation([5, 6], 4, oracle[1])


def test_a_prompt_that_no_step_has_room_for_fails_alone(oracle: tuple[str, dict[str, Any]]) -> None:
    with executor(oracle[0], enable_chunked_prefill=False) as running:
        (responses,) = answers(running, enqueue(running, [request([4] * 65, 4)]))
        assert "max_num_tokens is 64" in (responses[-1].error_msg or "")


@pytest.mark.parametrize("where", ["prepare_resources", "update_resources"])
def test_a_loop_that_dies_leaves_nobody_waiting(running: PyExecutor, where: str) -> None:
    class Broken(Watcher):
        pass

    def broken(*args: Any) -> None:
        raise RuntimeError("broken manager")

    setattr(Broken, where, broken)
    running.resource_manager.resource_managers["broken"] = Broken([])
    ids = enqueue(running, [request([5 + i, 6], 3) for i in range(12)])
    found = answers(running, ids)
    assert all("broken manager" in (responses[-1].error_msg or "") for responses in found)
    with pytest.raises(RuntimeError, match="broken manager"):
        running.await_responses(timeout=dt.timedelta(seconds=5))
    with pytest.raises(RuntimeError, match="shutdown"):
        running.enqueue_request(request([5], 1))
    assert running.is_shutdown
    assert not running.can_enqueue_requests()


def test_a_cancelled_request_answers_with_what_it_has(
    running: PyExecutor, oracle: tuple[str, dict[str, Any]]
) -> None:
    (request_id,) = enqueue(running, [request([5, 6], 200, streaming=True)])
    tokens = [t for r in running.await_responses(request_id) for t in _tokens(r)]
    running.cancel_request(request_id)
    (responses,) = answers(running, [request_id])
    assert responses[-1].result.finish_reasons == [FinishReason.CANCELLED]
    tokens += [token for response in responses for token in response.result.output_token_ids[0]]
    assert 0 < len(tokens) < 200
    assert tokens == expected_continuation([5, 6], len(tokens), oracle[1])
    with running.control_action():
        assert not running.kv_cache_manager.impl.sequences


def _tokens(response: Any) -> list[int]:
    response.result.deserialize()
    tokens: list[int] = response.result.output_token_ids[0]
    return tokens


def test_a_request_cancelled_before_it_ran_is_answered_too(oracle: tuple[str, dict[str, Any]]) -> None:
    with executor(oracle[0], max_batch_size=2) as running:
        with running.control_action():
            ids = running.enqueue_requests([request([5 + i], 30) for i in range(5)])
            running.cancel_request(ids[4])
        found = answers(running, ids)
        result = found[4][-1].result
        assert result.finish_reasons == [FinishReason.CANCELLED]
        assert result.output_token_ids == [[]]
        assert all(len(responses[-1].result.output_token_ids[0]) == 30 for responses in found[:4])
        assert not running.executor_request_queue.start_times


# ---- control, shutdown, construction ----


def test_the_loop_parks_when_all_is_done(running: PyExecutor) -> None:
    ids = running.enqueue_requests([request([5, 6], 30), request([7], 20)])
    with running.control_action() as parked:
        assert parked is running
        assert not running.active_requests
        later = running.enqueue_requests([request([5], 3)])
        assert running.await_responses(later[0], dt.timedelta(seconds=0.3)) == []
    answers(running, [*ids, *later])


def test_shutdown_completes_what_was_enqueued(oracle: tuple[str, dict[str, Any]]) -> None:
    with executor(oracle[0]) as running:
        ids = running.enqueue_requests([request([5, 6], 30), request([7], 20)])
        closing = threading.Thread(target=running.shutdown)
        closing.start()
        found = answers(running, ids)
        closing.join(20)
        assert not closing.is_alive()
        assert [len(responses[-1].result.output_token_ids[0]) for responses in found] == [30, 20]
        assert running.await_responses(timeout=dt.timedelta(seconds=5)) == []


def test_warm_up_runs_inside_the_constructor_twice_when_the_cache_is_sized(
    oracle: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    original = PyExecutor.__init__

    def init(
        self: PyExecutor, resource_manager: Any, scheduler: Any, model_engine: Any, *a: Any, **kw: Any
    ) -> None:
        forward = model_engine.forward

        def noting(batch: Any, *args: Any, **kwargs: Any) -> Any:
            everything = batch.all_requests()
            seen.append(
                (id(self), model_engine.is_warmup, all(r.is_dummy for r in everything), len(everything))
            )
            return forward(batch, *args, **kwargs)

        model_engine.forward = noting
        original(self, resource_manager, scheduler, model_engine, *a, **kw)
        model_engine.forward = forward
        seen.append("built")

    monkeypatch.setattr(PyExecutor, "__init__", init)
    with executor(oracle[0], kv_tokens=None, graphs=(1, 2, 4)) as running:
        assert not running.is_warmup
        assert not running.model_engine.is_warmup  # type: ignore[attr-defined]
        assert running.kv_cache_manager.max_tokens > 10_000
        assert seen.count("built") == 2
        assert len({entry[0] for entry in seen if entry != "built"}) == 2
        assert all(entry[1:3] == (True, True) for entry in seen if entry != "built")
        assert [entry[3] for entry in seen[1:4]] == [4, 2, 1]
        assert tokens_of(running, [request([5, 6], 4)]) == [expected_continuation([5, 6], 4, oracle[1])]


def test_estimation_runs_ordinary_requests_that_only_the_flag_marks(
    oracle: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[Any] = []
    original = PyExecutor._forward_step

    def noting(self: PyExecutor, batch: Any, *args: Any) -> Any:
        flags.append(
            (self.is_warmup, self.model_engine.is_warmup, any(r.is_dummy for r in batch.all_requests()))
        )  # type: ignore[attr-defined]
        return original(self, batch, *args)

    monkeypatch.setattr(PyExecutor, "_forward_step", noting)
    with executor(oracle[0], kv_tokens=None):
        assert flags
        assert set(flags) == {(True, True, False)}


def test_managers_stand_in_stocks_order_and_an_extra_one_cannot_be_added_twice(
    oracle: tuple[str, dict[str, Any]],
) -> None:
    extra = Watcher([])
    args = arguments(oracle[0])
    args.extra_resource_managers = {"mine": extra}
    with create_py_executor(args) as running:
        keys = [getattr(key, "name", key) for key in running.resource_manager.resource_managers]
        assert keys == ["DRAFT_KV_CACHE_MANAGER", "mine", "SEQ_SLOT_MANAGER", "KV_CACHE_MANAGER"]
    args = arguments(oracle[0], kv_tokens=None)
    args.extra_resource_managers = {"mine": extra}
    with pytest.raises(ValueError, match="Cannot overwrite existing resource manager mine"):
        create_py_executor(args)


def test_statistics_tell_of_each_iteration(oracle: tuple[str, dict[str, Any]]) -> None:
    with executor(oracle[0], enable_iter_perf_stats=True, enable_iter_req_stats=True) as running:
        tokens_of(running, [request([5, 6], 4), request([7], 3)])
        with running.control_action():
            stats = running.get_latest_iteration_stats()
        assert running.get_latest_iteration_stats() == []
    assert sum(entry["numNewActiveRequests"] for entry in stats) == 2
    assert sum(entry["numCompletedRequests"] for entry in stats) == 2
    assert max(entry["inflightBatchingStats"]["numContextRequests"] for entry in stats) == 2
    assert [entry["iter"] for entry in stats] == sorted(entry["iter"] for entry in stats)


def test_prompts_wait_for_a_fuller_step(oracle: tuple[str, dict[str, Any]]) -> None:
    path, config = oracle
    log: list[Any] = []
    with executor(path, batch_wait_timeout_iters=3, batch_wait_max_tokens_ratio=1.0) as running:
        (first,) = enqueue(running, [request([5, 6], 40, streaming=True)])
        with watched(running, ["_waiting_requests"], log):
            running.await_responses(first)
            (second,) = running.enqueue_requests([request([7], 3)])
            answers(running, [first, second])
    assert 1 <= len(log) <= 5
