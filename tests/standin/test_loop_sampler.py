"""Sampling: which token a row gets, alone or in company, and when a request ends."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.checkpoints import write_oracle_checkpoint  # noqa: E402
from support.loop import answers, enqueue, executor, request, tokens_of  # noqa: E402
from support.oracle import expected_continuation  # noqa: E402
from tensorrt_llm._torch.device import get_device  # noqa: E402
from tensorrt_llm._torch.pyexecutor.sampling_utils import (  # noqa: E402
    Strategy,
    resolve_strategy,
    sample_rows,
    uniform,
)
from tensorrt_llm.bindings.executor import FinishReason, SamplingConfig  # noqa: E402


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("oracle")
    config = write_oracle_checkpoint(path)
    with executor(str(path), graphs=(1, 2, 4, 8)) as built:
        built.oracle_config = config  # type: ignore[attr-defined]
        yield built


def draw(logits: torch.Tensor, strategy: Strategy, count: int) -> Counter[int]:
    rows = logits.expand(count, -1).to(get_device())
    draws = [uniform(1, position) for position in range(count)]
    return Counter(sample_rows(rows, [strategy] * count, draws).tolist())


def test_uniform_numbers_are_even_and_depend_on_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(250)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    buckets = Counter(int(10 * number) for number in numbers)
    assert all(850 < buckets[bucket] < 1150 for bucket in range(10))
    assert uniform(3, 7) == uniform(3, 7)
    assert uniform(-1, 0) != uniform(1, 0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    counts = draw(logits, Strategy(temperature), 20_000)
    for token, probability in enumerate((logits / temperature).softmax(-1).tolist()):
        assert abs(counts[token] / 20_000 - probability) < 0.015


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    assert set(draw(logits, Strategy(top_k=2), 2000)) == {1, 2}
    assert set(draw(logits, Strategy(top_p=0.39), 2000)) == {1}
    assert set(draw(logits, Strategy(top_p=0.69), 2000)) == {1, 2}
    assert set(draw(logits, Strategy(top_p=0.71), 2000)) == {1, 2, 3}
    counts = draw(logits, Strategy(top_k=2, top_p=0.9), 8000)
    assert abs(counts[1] / 8000 - 4 / 7) < 0.02


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 9))
def test_a_row_gets_the_same_token_in_any_company(seed: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 50, generator=generator).to(get_device())
    kinds = [
        Strategy(greedy=True),
        Strategy(0.7),
        Strategy(1.3, 5),
        Strategy(1.0, 0, 0.8),
        Strategy(2.0, 9, 0.5),
    ]
    strategies = [kinds[(seed + row) % len(kinds)] for row in range(rows)]
    draws = [uniform(seed, row) for row in range(rows)]
    together = sample_rows(logits, strategies, draws).tolist()
    alone = [sample_rows(logits[i : i + 1], [strategies[i]], [draws[i]]).item() for i in range(rows)]
    assert together == alone
    for row, strategy in enumerate(strategies):
        if strategy.greedy:
            assert together[row] == logits[row].argmax()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"top_k": 1, "seed": 3}]
)
def test_what_is_greedy(options: dict[str, Any]) -> None:
    assert resolve_strategy(SamplingConfig(**options)).greedy


def test_a_single_option_is_sampling_with_stocks_defaults_for_the_others() -> None:
    assert resolve_strategy(SamplingConfig(top_k=5)) == Strategy(1.0, 5, 1.0)
    assert resolve_strategy(SamplingConfig(temperature=0.4)) == Strategy(0.4, 0, 1.0)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(running: Any) -> None:
    asked = [
        request([5, 6, i], 12, seed=i, temperature=1.5, top_k=40 if i % 2 else None) for i in range(3, 10)
    ]
    together = tokens_of(running, asked)
    alone = [tokens_of(running, [one])[0] for one in asked]
    assert together == alone
    assert len(set(map(tuple, together))) == len(together)


def test_requests_without_a_seed_differ(running: Any) -> None:
    first, second = tokens_of(running, [request([5, 6], 12, temperature=2.0) for _ in range(2)])
    assert first != second


def test_the_end_id_ends_a_request_and_is_kept(running: Any) -> None:
    tokens = expected_continuation([5, 6, 7], 9, running.oracle_config)
    (responses,) = answers(running, enqueue(running, [request([5, 6, 7], 9, end_id=tokens[4])]))
    result = responses[0].result
    assert result.output_token_ids[0] == tokens[: tokens.index(tokens[4]) + 1]
    assert result.finish_reasons == [FinishReason.END_ID]


def test_min_tokens_keep_the_end_away(running: Any) -> None:
    tokens = expected_continuation([5, 6, 7], 9, running.oracle_config)
    (got,) = tokens_of(running, [request([5, 6, 7], 9, end_id=tokens[2], min_tokens=5)])
    assert got[:2] == tokens[:2]
    assert tokens[2] not in got[:5]
    assert len(got) >= 5


def test_a_stop_word_may_be_several_tokens(running: Any) -> None:
    tokens = expected_continuation([5, 6, 7], 9, running.oracle_config)
    stop = [[tokens[3], 96], tokens[3:5]]
    (responses,) = answers(running, enqueue(running, [request([5, 6, 7], 9, stop_words=stop)]))
    assert responses[0].result.output_token_ids[0] == tokens[:5]
    assert responses[0].result.finish_reasons == [FinishReason.STOP_WORDS]


def test_the_longest_sequence_ends_a_request(running: Any) -> None:
    (responses,) = answers(running, enqueue(running, [request([5] * 250, 40)]))
    assert len(responses[0].result.output_token_ids[0]) == 6
    assert responses[0].result.finish_reasons == [FinishReason.LENGTH]


@pytest.mark.parametrize("count", [1, 3])
def test_log_probabilities_name_the_chosen_token_and_the_best(running: Any, count: int) -> None:
    asked = [
        request(
            [5, 6, 7],
            5,
            output={"return_log_probs": True},
            py={"py_num_logprobs": count},
            seed=1,
            temperature=3.0,
        ),
        request([5, 6, 7], 5),
    ]
    found = answers(running, enqueue(running, asked))
    result = found[0][-1].result
    (steps,) = result.log_probs
    tokens = result.output_token_ids[0]
    assert len(steps) == len(tokens) == 5
    for token, entry in zip(tokens, steps, strict=True):
        assert count <= len(entry) <= count + 1
        assert {e.rank for t, e in entry.items() if t != token or e.rank <= count} >= set(range(1, count + 1))
        assert all(e.logprob <= 0 for e in entry.values())
        assert sum(math.exp(e.logprob) for e in entry.values()) < 1 + 1e-5
    assert math.isclose(
        result.cum_log_probs[0], sum(e[t].logprob for t, e in zip(tokens, steps, strict=True)), rel_tol=1e-6
    )
    assert found[1][-1].result.log_probs is None


@pytest.mark.parametrize("prompt", [[5, 6, 7], list(range(3, 93))])
def test_logits_come_back_for_each_token(running: Any, prompt: list[int]) -> None:
    running.reset_prefix_cache()
    wanted = {"return_context_logits": True, "return_generation_logits": True}
    found = answers(running, enqueue(running, [request(prompt, 6, output=wanted), request([9, 9], 3)]))
    result = found[0][-1].result
    assert tuple(result.context_logits.shape) == (len(prompt), 97)
    assert tuple(result.generation_logits.shape) == (1, 6, 97)
    tokens = result.output_token_ids[0]
    assert result.generation_logits[0].argmax(-1).tolist() == tokens
    assert result.context_logits[-1].argmax() == tokens[0]
    assert found[1][-1].result.output_token_ids[0] == expected_continuation([9, 9], 3, running.oracle_config)


def test_logits_are_complete_after_a_pause(tmp_path: Path) -> None:
    config = write_oracle_checkpoint(tmp_path)
    wanted = {"return_context_logits": True, "return_generation_logits": True}
    options: dict[str, Any] = {"policy": "MAX_UTILIZATION", "kv_tokens": 96, "reuse": False}
    asked = [[5 + i] * (9 + i) for i in range(4)]
    with executor(str(tmp_path), **options) as paused:
        found = answers(paused, enqueue(paused, [request(p, 40, output=wanted) for p in asked]))
    for prompt, responses in zip(asked, found, strict=True):
        result = responses[-1].result
        assert tuple(result.context_logits.shape) == (len(prompt), 97)
        assert result.generation_logits[0].argmax(-1).tolist() == expected_continuation(prompt, 40, config)
