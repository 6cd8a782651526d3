"""The engine in its own process, as by default: the option travels in and the rows travel out."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
from support.rollouts import ask, check_oracle, engine, prompts, settings, together

import trtllm_r3
from trtllm_r3.errors import UnsupportedError

Oracle = tuple[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "0")


def test_enable_in_the_parent_is_enough(oracle: Oracle) -> None:
    path, config = oracle
    asked = prompts(12, longest=120, vocab=config["vocab_size"], seed=4)
    with engine(path, **settings(moe_chunks=3)) as llm:
        outputs = together(llm, asked, [ask(max_tokens=1 + i, routed_experts_start=i % 2) for i in range(12)])
        [n2] = together(llm, [[5, 6, 7]], [ask(n=2, temperature=1.0, top_k=5, max_tokens=6)])
        stream = list(llm.generate_async([5, 6, 7], ask(max_tokens=5), streaming=True))
        workers = trtllm_r3.status()["workers"]
    for i, output in enumerate(outputs):
        check_oracle(output, config, start=i % 2)
    check_oracle(n2, config, index=0, greedy=False)
    check_oracle(n2, config, index=1, greedy=False)
    check_oracle(stream[-1], config)
    [counters] = [c for pid, c in workers.items() if int(pid) != os.getpid()]
    assert counters["rows"] > 100
    assert counters["rows_missing"] == 0
    assert 0 <= counters["age_s"] < 60


def test_the_environment_alone_is_enough(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = oracle
    monkeypatch.setenv("TRTLLM_R3", "1")
    monkeypatch.setenv("TRTLLM_R3_DEFAULT", "1")
    trtllm_r3.enable()
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi import KvCacheConfig

    cache = KvCacheConfig(enable_block_reuse=False, max_tokens=512)
    with LLM(
        model=path, skip_tokenizer_init=True, max_batch_size=4, max_num_tokens=64, kv_cache_config=cache
    ) as llm:
        [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, end_id=-1), use_tqdm=False)
    check_oracle(output, config)


def test_a_refusal_in_the_worker_reaches_the_caller(oracle: Oracle) -> None:
    from tensorrt_llm.llmapi import MoeConfig

    fused = engine(oracle[0], moe_config=MoeConfig(backend="TRTLLM"))
    with pytest.raises(UnsupportedError, match="inside its kernel"), fused:
        pass


def test_a_worker_without_hooks_is_named_and_never_silently_none(oracle: Oracle) -> None:
    from trtllm_r3.trtllm.runtime import runtime

    path, _ = oracle
    importlib.import_module("tensorrt_llm.llmapi.mpi_session")
    trtllm_r3.enable()
    [patch] = [p for p in runtime().patcher.patches if p.target.attribute == "MpiPoolSession.submit"]
    patch.placed.on = False
    try:
        with engine(path, **settings()) as llm:
            [output] = together(llm, [[5, 6, 7]], [ask(max_tokens=3)])
    finally:
        patch.placed.on = True
    assert output.outputs[0].routed_experts is None
    assert trtllm_r3.routes_of(output.outputs[0]).why_none == "worker not armed"
