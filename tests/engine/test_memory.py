"""Nothing of a request stays behind."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
from support.rollouts import ask, engine, settings, together

from trtllm_r3.flow.recorder import Track

Oracle = tuple[str, dict[str, Any]]


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_requests_one_after_another_leave_nothing_behind(oracle: Oracle, count: int) -> None:
    path, config = oracle
    with engine(path, **settings()) as llm:
        recorder = llm._executor.engine.model_engine._trtllm_r3.recorder
        sizes = []
        for i in range(count):
            together(llm, [[3 + i % 90, 5, 6]], [ask(max_tokens=1 + i % 4)])
            if i % (count // 4) == 0:
                gc.collect()
                sizes.append(psutil.Process().memory_info().rss)
        gc.collect()
        assert recorder.store.live == 0
        assert recorder.store.pages_used == 0
        assert not recorder.copier.tickets or recorder.copier.tickets[0].layout.step == recorder._step
        assert len(recorder.store._table) == 16
        assert sum(type(o) is Track for o in gc.get_objects()) <= 300
    assert sizes[-1] - sizes[1] < 8 << 20


def test_cancelled_and_failed_requests_leave_nothing_behind(oracle: Oracle) -> None:
    path, config = oracle
    with engine(path, **settings()) as llm:
        recorder = llm._executor.engine.model_engine._trtllm_r3.recorder
        futures = [llm.generate_async([3 + i, 5, 6], ask(max_tokens=200)) for i in range(40)]
        for future in futures:
            future.abort()
        for future in futures:
            assert future.result().outputs[0].finish_reason == "cancelled"
        together(llm, [[5, 6]], [ask(max_tokens=2)])
        assert recorder.store.live == 0
