"""Rows of hits in the KV cache are those of the forward that wrote the KV, or missing; never others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.nonce import Nonces
from support.rollouts import ask, cached, engine, prompts, together

import trtllm_r3

Oracle = tuple[str, dict[str, Any]]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
def test_ten_turns_of_a_conversation_are_complete(
    oracle: Oracle, overlap: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    nonces = Nonces(monkeypatch)
    history: list[int] = []
    earlier = None
    with engine(path, **cached(overlap=overlap, graphs=graphs)) as llm:
        for turn in range(10):
            history += prompts(1, longest=20, vocab=97, seed=turn)[0]
            [output] = together(llm, [history], [ask(max_tokens=5 + turn)])
            assert nonces.check(output, config) == {}
            rows = output.outputs[0].routed_experts
            if earlier is not None:
                assert (rows[: len(earlier)] == earlier).all()
                assert len(nonces.hits[output.request_id]) >= len(earlier) - 8
            history, earlier = history + output.outputs[0].token_ids, rows


def test_those_who_did_not_ask_feed_those_who_do(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = oracle
    nonces = Nonces(monkeypatch)
    [prompt] = prompts(1, longest=200, vocab=97, seed=3)
    prompt = (prompt * 40)[:90]
    with engine(path, **cached()) as llm:
        together(llm, [prompt], [ask(return_routed_experts=False, max_tokens=4)])
        [output] = together(llm, [[*prompt, 7, 8, 9]], [ask()])
    assert nonces.check(output, config) == {}
    assert len(nonces.hits[output.request_id]) >= 88


@pytest.mark.parametrize("overlap", [True, False])
def test_siblings_of_one_prompt_are_never_mixed_up(
    oracle: Oracle, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    nonces = Nonces(monkeypatch)
    [prompt] = prompts(1, longest=60, vocab=97, seed=11)
    prompt = (prompt * 20)[:45]
    missing = 0
    with engine(path, **cached(overlap=overlap)) as llm:
        for batch in range(4):
            outputs = together(
                llm,
                [prompt] * 8,
                [ask(max_tokens=9, temperature=1.0, top_k=9, seed=100 * batch + i) for i in range(8)],
            )
            for output in outputs:
                causes = nonces.check(output, config)
                assert set(causes) <= {"kv recomputed"}
                missing += sum(causes.values())
    # What can't be proven lies within the one partly filled block of each hit.
    assert missing <= 4 * 8 * 7


def test_a_new_prompt_in_the_blocks_of_an_old_one_gets_nothing_of_it(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    nonces = Nonces(monkeypatch)
    with engine(path, **cached(kv_tokens=256)) as llm:
        for seed in range(12):
            asked = prompts(6, longest=60, vocab=97, seed=seed % 5)
            for output in together(llm, asked, [ask(max_tokens=6)] * 6):
                nonces.check(output, config)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("reuse", [True, False])
def test_preempted_requests_keep_the_rows_of_their_first_pass(
    oracle: Oracle, overlap: bool, reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    nonces = Nonces(monkeypatch)
    options = cached(kv_tokens=192, policy="MAX_UTILIZATION", enable_block_reuse=reuse, overlap=overlap)
    with engine(path, **options) as llm:
        recorder = llm._executor.engine.model_engine._trtllm_r3.recorder
        asked = prompts(8, longest=40, vocab=97, seed=21)
        for output in together(llm, asked, [ask(max_tokens=60)] * 8):
            assert set(nonces.check(output, config)) <= {"kv recomputed", "prefix"}
        assert recorder.counters["resumed"] > 0
        assert recorder.counters["rows_recomputed_otherwise"] > 0
        assert recorder.store.live == 0


def test_nothing_of_before_a_reset_is_served_after_it(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    nonces = Nonces(monkeypatch)
    [prompt] = prompts(1, longest=60, vocab=97, seed=11)
    prompt = (prompt * 20)[:45]
    with engine(path, **cached()) as llm:
        stream = llm.generate_async(prompt, ask(max_tokens=300), streaming=True)
        next(iter(stream))
        llm._executor.engine.reset_prefix_cache()
        for _ in stream:
            pass
        assert nonces.check(stream, config) == {}
        [output] = together(llm, [prompt], [ask()])
        versions = {run.version for run in trtllm_r3.routes_of(stream.outputs[0]).versions}
    assert set(nonces.check(output, config)) <= {"kv recomputed", "prefix"}
    assert trtllm_r3.routes_of(output.outputs[0]).epochs.unique().tolist() == [max(versions)]
    assert len(versions) == 2


def test_a_cap_of_zero_marks_every_hit(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = oracle
    trtllm_r3.enable(shared_cache_tokens=0)
    nonces = Nonces(monkeypatch)
    [prompt] = prompts(1, longest=60, vocab=97, seed=11)
    with engine(path, **cached()) as llm:
        together(llm, [prompt * 9], [ask()])
        [output] = together(llm, [prompt * 9], [ask()])
    hits = len(nonces.hits[output.request_id])
    assert nonces.check(output, config) == {"prefix": hits}
    assert hits


@hypothesis_settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_schedule_of_shared_prefixes(oracle: Oracle, data: st.DataObject) -> None:
    path, config = oracle
    trtllm_r3.enable()
    draw = data.draw
    options = cached(
        kv_tokens=draw(st.sampled_from([192, 320, 1024])),
        policy=draw(st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])),
        overlap=draw(st.booleans()),
        graphs=draw(st.booleans()),
        moe_chunks=draw(st.sampled_from([1, 3])),
        enable_partial_reuse=draw(st.booleans()),
        copy_on_partial_reuse=draw(st.booleans()),
    )
    stems = prompts(3, longest=50, vocab=97, seed=draw(st.integers(0, 5)))
    with pytest.MonkeyPatch.context() as patch:
        nonces = Nonces(patch)
        with engine(path, **options) as llm:
            for _ in range(draw(st.integers(2, 5))):
                asked = []
                for _ in range(draw(st.integers(1, 6))):
                    stem = draw(st.sampled_from(stems))
                    tail = draw(st.lists(st.integers(3, 96), max_size=12))
                    asked.append([*stem[: draw(st.integers(1, len(stem)))], *tail])
                lengths = draw(st.lists(st.integers(1, 30), min_size=len(asked), max_size=len(asked)))
                for output in together(llm, asked, [ask(max_tokens=n) for n in lengths]):
                    assert set(nonces.check(output, config)) <= {"kv recomputed", "prefix"}
                if draw(st.integers(0, 4)) == 0:
                    llm._executor.engine.reset_prefix_cache()
