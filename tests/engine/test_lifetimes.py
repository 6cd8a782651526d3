"""Several engines in one process, and engines that outlive the switch."""

from __future__ import annotations

from typing import Any

from support.checkpoints import write_oracle_checkpoint
from support.rollouts import ask, check_oracle, engine, prompts, settings, together

import trtllm_r3

Oracle = tuple[str, dict[str, Any]]


def test_two_engines_in_one_process_have_rows_of_their_own(oracle: Oracle, tmp_path: Any) -> None:
    path, config = oracle
    other = write_oracle_checkpoint(
        tmp_path, num_hidden_layers=4, num_experts=9, num_experts_per_tok=2, vocab_size=61
    )
    with engine(path, **settings()) as first, engine(str(tmp_path), **settings()) as second:
        one = [first.generate_async(p, ask()) for p in prompts(6, longest=40, vocab=61)]
        two = [second.generate_async(p, ask()) for p in prompts(6, longest=40, vocab=61)]
        for a, b in zip(one, two, strict=True):
            check_oracle(a.result(), config)
            check_oracle(b.result(), other)
        second.shutdown()
        [output] = together(first, [[5, 6, 7]], [ask()])
    check_oracle(output, config)


def test_warm_up_leaves_nothing_in_store_and_cache(oracle: Oracle) -> None:
    with engine(oracle[0], reuse=True, **settings()) as llm:
        recorder = llm._executor.engine.model_engine._trtllm_r3.recorder
        assert recorder.counters["rows"] == recorder.store.live == recorder.store.pages_used == 0
        assert recorder.cache is not None
        assert not recorder.cache._cause.any()


def test_switching_off_under_load_fails_no_request_and_gives_no_wrong_row(oracle: Oracle) -> None:
    from support.oracle import expected_continuation, expected_ids

    path, config = oracle
    with engine(path, **settings()) as llm:
        stream = llm.generate_async([5, 6, 7], ask(max_tokens=200), streaming=True)
        for output in stream:
            if len(output.outputs[0].token_ids) == 40:
                [captured] = trtllm_r3.status()["engines"][-1:]
                for live in list(trtllm_r3.trtllm.runtime.runtime().engines):
                    live.detach()
        assert captured["degraded"] == ""
    tokens = [5, 6, 7, *output.outputs[0].token_ids]
    assert tokens[3:] == expected_continuation([5, 6, 7], 200, config)
    routes = trtllm_r3.routes_of(output.outputs[0])
    assert routes.ids is not None
    want, got = expected_ids(tokens[:-1], None, None, config), routes.ids.numpy()
    assert got.shape == want.shape
    assert ((got == want) | (got == -1)).all()
    assert not routes.missing[:40].any()
    assert routes.missing[100:].all()
