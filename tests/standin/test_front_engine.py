"""The front on the real engine, in this process and in a worker: every token as the oracle model says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.checkpoints import write_oracle_checkpoint  # noqa: E402
from support.oracle import expected_continuation  # noqa: E402
from tensorrt_llm import LLM, SamplingParams  # noqa: E402
from tensorrt_llm.executor import GenerationExecutorProxy, GenerationExecutorWorker  # noqa: E402
from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig, RequestError  # noqa: E402

SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_batch_size": 4,
    "max_num_tokens": 64,
    "max_seq_len": 96,
    "cuda_graph_config": CudaGraphConfig(batch_sizes=[1, 2, 4], enable_padding=True),
    "kv_cache_config": KvCacheConfig(max_tokens=1024),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("oracle")
    return path, write_oracle_checkpoint(path)


@pytest.fixture(scope="module", params=["in process", "in worker"])
def llm(request: pytest.FixtureRequest, checkpoint: tuple[Path, dict[str, Any]]) -> Iterator[Any]:
    single = "1" if request.param == "in process" else "0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", single)
        llm = LLM(model=str(checkpoint[0]), **SMALL)
    kind = GenerationExecutorWorker if single == "1" else GenerationExecutorProxy
    assert type(llm._executor) is kind
    with llm:
        yield llm


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"end_id": 2, "max_tokens": 8, **options})


def test_many_prompts_of_many_lengths(llm, checkpoint):
    prompts = [[3 + (7 * i + j) % 90 for j in range(1 + (i * 5) % 60)] for i in range(20)]
    outputs = llm.generate(prompts, params(ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == expected_continuation(prompt, 8, checkpoint[1])
        assert output.outputs[0].finish_reason == "length"


def test_an_end_token_a_stop_token_and_streaming(llm, checkpoint):
    whole = expected_continuation([5, 6, 7], 8, checkpoint[1])
    stop = whole[4]
    cut = whole[: whole.index(stop)]
    ended = llm.generate([5, 6, 7], params(end_id=stop), use_tqdm=False).outputs[0]
    assert (ended.token_ids, ended.finish_reason) == ([*cut, stop], "stop")
    stopped = llm.generate([5, 6, 7], params(stop_token_ids=[stop], ignore_eos=True), use_tqdm=False).outputs[
        0
    ]
    assert (stopped.token_ids, stopped.stop_reason) == (cut, stop)
    lengths, output = [], None
    for output in llm.generate_async([5, 6, 7], params(ignore_eos=True), streaming=True):
        lengths.append(output.outputs[0].length)
    assert output is not None
    assert output.outputs[0].token_ids == whole
    assert lengths == sorted(set(lengths))


def test_several_samples_with_a_seed_are_the_same_every_time(llm):
    options = params(n=3, temperature=1.0, top_k=5, seed=11, ignore_eos=True)
    first, second = (llm.generate([9, 8, 7], options, use_tqdm=False) for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len(first.outputs) == 3
    assert [o.finish_reason for o in first.outputs] == ["length"] * 3
    assert len({tuple(o.token_ids) for o in first.outputs}) > 1


@pytest.mark.parametrize("streaming", [False, True])
def test_logprobs_hold_the_token_taken_and_the_likeliest(llm, streaming):
    future = llm.generate_async([9, 8, 7], params(logprobs=2, ignore_eos=True), streaming=streaming)
    output = future.result().outputs[0]
    assert len(output.logprobs) == 8
    for token, found in zip(output.token_ids, output.logprobs, strict=True):
        assert token in found
        assert found[token].rank == 1
        assert len(found) >= 2
    chosen = [found[token].logprob for token, found in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)


def test_a_request_that_asks_gets_its_times(llm):
    output = llm.generate([9, 8, 7], params(return_perf_metrics=True, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].request_perf_metrics is not None
    assert output.metrics_dict["e2e"] >= output.metrics_dict["ttft"] > 0


def test_a_prompt_without_room_for_output_fails_alone(llm, checkpoint):
    llm.args.max_num_tokens, before = 1000, llm.args.max_num_tokens
    other = llm.generate_async([5, 6, 7], params(ignore_eos=True))
    try:
        with pytest.raises(RequestError, match="max_seq_len"):
            llm.generate([5] * 200, params(), use_tqdm=False)
    finally:
        llm.args.max_num_tokens = before
    assert other.result().outputs[0].token_ids == expected_continuation([5, 6, 7], 8, checkpoint[1])


def test_max_tokens_is_cut_to_the_room_that_is_left(llm):
    output = llm.generate([5] * 60, params(max_tokens=500, ignore_eos=True), use_tqdm=False).outputs[0]
    assert (output.length, output.finish_reason) == (SMALL["max_seq_len"] - 60, "length")


def test_a_cancelled_request_keeps_its_tokens(llm, checkpoint):
    future = llm.generate_async([5, 6, 7], params(max_tokens=80, ignore_eos=True), streaming=True)
    next(future)
    future.abort()
    output = future.result(timeout=30).outputs[0]
    assert output.finish_reason == "cancelled"
    assert output.token_ids == expected_continuation([5, 6, 7], output.length, checkpoint[1])


def test_nothing_is_left_of_finished_requests(llm):
    llm.generate([[5, 6, 7]] * 8, params(), use_tqdm=False)
    assert not llm._executor._results


def test_logits_come_back_from_an_engine_in_this_process(checkpoint):
    os.environ.pop("TLLM_WORKER_USE_SINGLE_PROCESS", None)
    with LLM(model=str(checkpoint[0]), gather_generation_logits=True, **SMALL) as llm:
        assert type(llm._executor) is GenerationExecutorWorker
        asked = params(return_generation_logits=True, return_context_logits=True, ignore_eos=True)
        output = llm.generate([5, 6, 7], asked, use_tqdm=False)
    logits = output.outputs[0].generation_logits
    assert tuple(logits.shape) == (8, checkpoint[1]["vocab_size"])
    assert logits.argmax(-1).tolist() == output.outputs[0].token_ids
    assert tuple(output.context_logits.shape) == (3, checkpoint[1]["vocab_size"])
