"""What a request may ask for, and what it gets: offset, streaming, several answers, cancel, refusals."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from support.rollouts import ask, check_oracle, engine, prompts, settings, together

import trtllm_r3
from trtllm_r3.errors import RequestRefused, RoutesMissing

Oracle = tuple[str, dict[str, Any]]


@pytest.mark.parametrize("start", [0, 1, 4, 5])
def test_rows_from_an_offset_equal_the_tail(oracle: Oracle, start: int) -> None:
    path, config = oracle
    with engine(path, **settings()) as llm:
        [output] = together(llm, [[5, 6, 7, 8, 9]], [ask(max_tokens=6, routed_experts_start=start)])
    check_oracle(output, config, start=start)


def test_an_offset_beyond_the_prompt_is_refused_and_others_go_on(oracle: Oracle) -> None:
    path, config = oracle
    with engine(path, **settings()) as llm:
        with pytest.raises(RequestRefused, match="routed_experts_start"):
            llm.generate([5, 6, 7], ask(routed_experts_start=4), use_tqdm=False)
        [output] = together(llm, [[5, 6, 7]], [ask()])
    check_oracle(output, config)


@pytest.mark.parametrize(
    "bad", [{"return_routed_experts": 1}, {"routed_experts_start": -1}, {"routed_experts_start": 1.5}]
)
def test_options_of_the_wrong_kind_are_refused_at_once(bad: dict[str, Any]) -> None:
    trtllm_r3.enable()
    with pytest.raises(RequestRefused, match=next(iter(bad))):
        ask(**bad)


def test_asking_an_engine_without_the_option_names_the_switch(oracle: Oracle) -> None:
    path, config = oracle
    trtllm_r3.enable()
    with engine(path, routes=False, **settings()) as llm:
        with pytest.raises(ValueError, match="enable_return_routed_experts"):
            llm.generate([5, 6], ask(), use_tqdm=False)
        [output] = together(llm, [[5, 6]], [ask(return_routed_experts=False)])
    assert output.outputs[0].routed_experts is None
    assert trtllm_r3.routes_of(output.outputs[0]).why_none == "not asked for"


def test_those_who_did_not_ask_get_none_beside_those_who_did(oracle: Oracle) -> None:
    path, config = oracle
    asked = prompts(8, longest=90, vocab=config["vocab_size"], seed=1)
    with engine(path, **settings()) as llm:
        outputs = together(llm, asked, [ask(return_routed_experts=i % 2 == 0) for i in range(8)])
    for i, output in enumerate(outputs):
        if i % 2:
            assert output.outputs[0].routed_experts is None
        else:
            check_oracle(output, config)


def test_the_default_asks_for_every_request_and_leaves_the_users_object_alone(oracle: Oracle) -> None:
    path, config = oracle
    trtllm_r3.enable(default_return=True)
    params = ask(return_routed_experts=False, max_tokens=5)
    with engine(path, **settings()) as llm:
        [output] = together(llm, [[5, 6, 7]], params)
    check_oracle(output, config)
    assert params.return_routed_experts is False


def test_streamed_rows_come_with_the_last_chunk_and_equal_the_others(oracle: Oracle) -> None:
    path, config = oracle
    with engine(path, **settings()) as llm:
        seen = []
        stream = llm.generate_async([5, 6, 7, 8], ask(max_tokens=7), streaming=True)
        for output in stream:
            seen.append(output.outputs[0].routed_experts is not None)
    check_oracle(output, config)
    assert seen == [False] * (len(seen) - 1) + [True]


def test_a_stop_string_that_only_the_text_shows_is_named(oracle: Oracle) -> None:
    from support.tokens import character_tokenizer

    path, _ = oracle
    options = {**settings(), "skip_tokenizer_init": False}
    with engine(path, tokenizer=character_tokenizer(97), **options) as llm:
        plain = llm.generate([5, 6, 7, 8], ask(max_tokens=30), use_tqdm=False).outputs[0]
        # The engine looks for the words at the end of each step; a client may find them only in the text.
        middle = plain.text[10:12]
        stream = llm.generate_async([5, 6, 7, 8], ask(max_tokens=30), streaming=True)
        stream.sampling_params.stop, stream.sampling_params._stop_word_ids = [middle], [[96] * 9]
        *_, last = list(stream)
    assert last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].routed_experts is None
    assert trtllm_r3.routes_of(last.outputs[0]).why_none == "stopped in text"


def test_several_answers_have_their_own_rows(oracle: Oracle) -> None:
    path, config = oracle
    with engine(path, **settings()) as llm:
        [output] = together(llm, [[5, 6, 7, 8]], [ask(n=3, temperature=1.0, top_k=8, seed=3, max_tokens=9)])
    assert len(output.outputs) == 3
    for index in range(3):
        check_oracle(output, config, index=index, greedy=False)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", [1, 2, 17])
@pytest.mark.parametrize("keep", [True, False])
def test_a_sequence_that_stops_has_one_row_less_than_tokens(
    oracle: Oracle, overlap: bool, at: int, keep: bool
) -> None:
    from support.oracle import expected_continuation

    path, config = oracle
    prompt = next(
        p
        for p in ([3 + i, 5, 8] for i in range(90))
        if (c := expected_continuation(p, 20, config)).index(c[at - 1]) == at - 1
    )
    last = expected_continuation(prompt, 20, config)[at - 1]
    with engine(path, **settings(overlap=overlap)) as llm:
        by_end, by_stop = together(
            llm,
            [prompt] * 2,
            [
                ask(max_tokens=20, end_id=last),
                ask(max_tokens=20, stop_token_ids=[last], include_stop_str_in_output=keep),
            ],
        )
    assert by_end.outputs[0].finish_reason == by_stop.outputs[0].finish_reason == "stop"
    assert len(by_stop.outputs[0].token_ids) == (at if keep else at - 1)
    for output in (by_end, by_stop):
        check_oracle(output, config)


def test_a_cancelled_request_returns_the_rows_of_its_tokens(oracle: Oracle) -> None:
    path, config = oracle
    with engine(path, **settings()) as llm:
        stream = llm.generate_async([5, 6, 7, 8], ask(max_tokens=400), streaming=True)
        for output in stream:
            if len(output.outputs[0].token_ids) >= 3:
                stream.abort()
        assert output.outputs[0].finish_reason == "cancelled"
        check_oracle(output, config)
        assert llm._executor.engine.model_engine._trtllm_r3.recorder.store.live == 0


def test_a_missing_row_raises_where_the_user_wants_it_so(oracle: Oracle) -> None:
    path, config = oracle
    trtllm_r3.enable(on_gap="error", shared_cache_tokens=0)
    prompt = prompts(1, longest=200, vocab=config["vocab_size"], seed=3)[0] * 20
    with engine(path, reuse=True, **settings()) as llm:
        (first,) = together(llm, [prompt[:150]], [ask()])
        (second,) = together(llm, [prompt[:150]], [ask()])
    check_oracle(first, config)
    with pytest.raises(RoutesMissing, match="prefix"):
        _ = second.outputs[0].routed_experts
    assert trtllm_r3.routes_of(second.outputs[0]).ids is not None


def test_the_option_survives_copies_pickles_and_stock_code_that_writes_to_its_place() -> None:
    trtllm_r3.enable()
    params = ask(routed_experts_start=7)
    params._return_log_probs = True
    for twin in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert (twin.return_routed_experts, twin.routed_experts_start) == (True, 7)
        assert bool(twin._return_log_probs) is True
        twin._return_log_probs = False
        assert bool(twin._return_log_probs) is False
        assert (twin.return_routed_experts, twin.routed_experts_start) == (True, 7)
        twin.return_routed_experts = False
        assert (twin.return_routed_experts, twin.routed_experts_start) == (False, 7)


def test_params_made_while_enabled_load_in_a_process_that_is_not(oracle: Oracle) -> None:
    trtllm_r3.enable()
    packed = pickle.dumps(ask())
    trtllm_r3.disable()
    params = pickle.loads(packed)
    assert params.max_tokens == 8
    assert not hasattr(params, "return_routed_experts")
