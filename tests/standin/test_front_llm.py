"""Prompts in, outputs out: the LLM class over an engine without a model, in this process and in a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.fake_engine import ERROR, REFUSE, SLOW, InProcess, InWorker, numbers  # noqa: E402
from tensorrt_llm import LLM, SamplingParams  # noqa: E402
from tensorrt_llm.llmapi import DisaggregatedParams, RequestError  # noqa: E402


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(scope="module", params=[InProcess, InWorker], ids=["in process", "in worker"])
def llm(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Any]:
    with LLM(model=model_dir, skip_tokenizer_init=True, executor_cls=request.param, max_num_tokens=50) as llm:
        yield llm


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"end_id": 999, "max_tokens": 4, **options})


def generate(llm: Any, inputs: Any, sampling_params: Any = None, **options: Any) -> Any:
    return llm.generate(inputs, sampling_params or params(), use_tqdm=False, **options)


def test_one_prompt_gives_one_output(llm):
    output = generate(llm, [1, 2])
    assert output.outputs[0].token_ids == numbers([1, 2], 4)
    assert (output.outputs[0].finish_reason, output.finished, output.prompt_token_ids) == (
        "length",
        True,
        [1, 2],
    )


def test_a_batch_gives_outputs_in_its_order_each_with_its_own_parameters(llm):
    prompts = [[i, 1] for i in range(1, 20)]
    outputs = generate(llm, prompts, [params(max_tokens=1 + i % 5) for i in range(19)])
    assert [o.outputs[0].token_ids for o in outputs] == [numbers(p, 1 + i % 5) for i, p in enumerate(prompts)]


def test_an_empty_batch_gives_nothing(llm):
    assert generate(llm, []) == []


def test_dictionaries_are_prompts_too(llm):
    assert generate(llm, [{"prompt_token_ids": [3]}])[0].outputs[0].token_ids == numbers([3], 4)


@pytest.mark.parametrize(
    ("options", "tokens", "reason", "stop_reason"),
    [
        ({"end_id": 5}, [3, 4, 5], "stop", None),
        ({"end_id": 5, "ignore_eos": True}, [3, 4, 5, 6], "length", None),
        ({"stop_token_ids": [4]}, [3], "stop", 4),
        ({"stop_token_ids": [4], "include_stop_str_in_output": True}, [3, 4], "stop", 4),
    ],
)
def test_a_sequence_ends_for_its_reason(llm, options, tokens, reason, stop_reason):
    output = generate(llm, [1, 2], params(**options)).outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (tokens, reason, stop_reason)


def test_streaming_shows_each_token_once(llm):
    seen, diffs = [], []
    for output in llm.generate_async([1, 2], params(), streaming=True):
        seen.append(list(output.outputs[0].token_ids))
        diffs += output.outputs[0].token_ids_diff
    assert seen == [numbers([1, 2], k) for k in range(1, 5)]
    assert diffs == numbers([1, 2], 4)


@pytest.mark.parametrize("streaming", [False, True])
def test_several_sequences_keep_apart_and_each_has_its_finish_reason(llm, streaming):
    options = params(n=3, temperature=1.0, stop_token_ids=[104], include_stop_str_in_output=True)
    output = llm.generate_async([1, 2], options, streaming=streaming).result()
    assert [o.token_ids for o in output.outputs] == [
        numbers([1, 2], 4),
        numbers([1, 2], 2, index=1),
        numbers([1, 2], 4, index=2),
    ]
    assert [o.finish_reason for o in output.outputs] == ["length", "stop", "length"]


@pytest.mark.parametrize("streaming", [False, True])
def test_each_token_has_its_logprob(llm, streaming):
    output = llm.generate_async([1, 2], params(logprobs=1), streaming=streaming).result().outputs[0]
    assert [list(position) for position in output.logprobs] == [[token] for token in output.token_ids]
    assert output.cumulative_logprob == -2.0


def test_an_aborted_request_ends_cancelled_with_its_tokens_so_far(llm):
    future = llm.generate_async([SLOW], params(max_tokens=50), streaming=True)
    for output in future:
        if len(output.outputs[0].token_ids) == 3:
            future.abort()
    assert future.aborted()
    assert (future.outputs[0].token_ids, future.outputs[0].finish_reason) == (numbers([SLOW], 3), "cancelled")


def test_a_request_can_be_awaited_and_streamed_in_an_asyncio_loop(llm):
    async def both() -> tuple[Any, list[int]]:
        whole = await llm.generate_async([1, 2], params())
        lengths = [
            len(o.outputs[0].token_ids) async for o in llm.generate_async([5], params(), streaming=True)
        ]
        return whole, lengths

    whole, lengths = asyncio.run(both())
    assert whole.outputs[0].token_ids == numbers([1, 2], 4)
    assert lengths == [1, 2, 3, 4]


def test_waiting_ends_at_its_timeout(llm):
    future = llm.generate_async([SLOW], params(max_tokens=50))
    with pytest.raises(TimeoutError, match="no response"):
        future.result(timeout=0.05)
    future.abort()
    assert future.result(timeout=5).outputs[0].finish_reason == "cancelled"


@pytest.mark.parametrize("prompt", [[REFUSE], [ERROR], [1] * 70], ids=["not taken", "fails", "too long"])
def test_a_failing_request_fails_alone(llm, prompt):
    other = llm.generate_async([1, 2], params())
    llm.args.max_num_tokens = 1000  # let the engine's own limit speak
    try:
        with pytest.raises(RequestError):
            generate(llm, prompt)
        assert other.result().outputs[0].token_ids == numbers([1, 2], 4)
        assert generate(llm, [2]).outputs[0].token_ids == numbers([2], 4)
    finally:
        llm.args.max_num_tokens = 50


@pytest.mark.parametrize(
    ("prompt", "options", "arguments", "error", "words"),
    [
        ([], {}, {}, ValueError, "empty"),
        ({"prompt_token_ids": []}, {}, {}, ValueError, "empty"),
        ([1] * 51, {}, {}, ValueError, r"51.*max_num_tokens \(50\)"),
        (1.5, {}, {}, TypeError, "prompt must be"),
        ("text", {}, {}, ValueError, "tokenizer"),
        ({"prompt_token_ids": [1], "multi_modal_data": {}}, {}, {}, ValueError, "multi_modal_data"),
        ([1], {"end_id": None}, {}, ValueError, "end_id"),
        ([1], {"stop": "x"}, {}, ValueError, "stop='x' needs a tokenizer"),
        ([1], {"use_beam_search": True, "n": 2}, {}, ValueError, "use_beam_search=True"),
        ([1], {"best_of": 2, "temperature": 1.0}, {}, ValueError, "best_of=2"),
        ([1], {"repetition_penalty": 1.1}, {}, ValueError, "repetition_penalty=1.1"),
        ([1], {"embedding_bias": [0.0, 1.0]}, {}, ValueError, "embedding_bias"),
        ([1], {"prompt_logprobs": 1}, {}, ValueError, "prompt_logprobs=1"),
        ([1], {}, {"lora_request": "l"}, ValueError, "lora_request='l'"),
        (
            [1],
            {},
            {"disaggregated_params": DisaggregatedParams(request_type="context_only")},
            ValueError,
            "context_only",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(llm, prompt, options, arguments, error, words):
    with pytest.raises(error, match=words):
        llm.generate_async(prompt, params(**options), **arguments)


def test_neutral_values_are_taken(llm):
    neutral = params(repetition_penalty=1.0, presence_penalty=0.0, min_p=0.0, n=1, best_of=1)
    whole = DisaggregatedParams(request_type="context_and_generation")
    output = generate(llm, [1], neutral, disaggregated_params=whole)
    assert output.outputs[0].token_ids == numbers([1], 4)


def test_statistics_arrive_when_asked_for(model_dir):
    for executor_cls in (InProcess, InWorker):
        with LLM(
            model=model_dir, skip_tokenizer_init=True, executor_cls=executor_cls, enable_iter_perf_stats=True
        ) as llm:
            generate(llm, [1])
            assert llm.get_stats(timeout=0.5) == [{"iter": 1, "note": None}]


def test_nothing_is_left_of_finished_requests(llm):
    generate(llm, [[i] for i in range(1, 40)])
    assert not llm._executor._results
    assert not getattr(llm._executor, "_client_id_to_request_id", None)


@pytest.mark.parametrize("executor_cls", [InProcess, InWorker], ids=["in process", "in worker"])
def test_the_end_cancels_what_runs_and_takes_nothing_new(model_dir, executor_cls):
    llm = LLM(model=model_dir, skip_tokenizer_init=True, executor_cls=executor_cls)
    pending = llm.generate_async([SLOW], params(max_tokens=50))
    llm.shutdown()
    llm.shutdown()
    assert pending.result(timeout=5).outputs[0].finish_reason == "cancelled"
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async([1], params())


def test_too_few_parameters_for_a_batch_are_an_error_before_anything_runs(llm):
    with pytest.raises(ValueError, match="sampling_params has 1 entries"):
        generate(llm, [[1], [2]], [params()])
