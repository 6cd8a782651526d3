"""With real graphs, streams and events: no order of them gives a wrong row, and nothing waits for the device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rollouts import ask, check_oracle, engine, prompts, settings, together

import trtllm_r3
from trtllm_r3.flow.copier import CudaStream
from trtllm_r3.flow.recorder import RouteRecorder

Oracle = tuple[str, dict[str, Any]]
REQUESTS = int(os.environ.get("R3_TEST_REQUESTS", "200"))
_CYCLES = 2_000_000  # about a millisecond


def sleep_first(real: Callable[..., Any], every: int) -> Callable[..., Any]:
    """The same call behind a delay kernel on the current stream, each `every`-th time."""
    count = itertools.count()

    def delayed(*args: Any, **kwargs: Any) -> Any:
        if next(count) % every == 0:
            torch.cuda._sleep(_CYCLES)
        return real(*args, **kwargs)

    return delayed


def late_copies(self: CudaStream, copy: Callable[[], None], real: Any = CudaStream.after_current) -> Any:
    def slow() -> None:
        torch.cuda._sleep(_CYCLES)
        copy()

    return real(self, slow)


def run(oracle: Oracle, requests: int, **options: Any) -> int:
    path, config = oracle
    rows = 0
    with engine(
        path, kv_tokens=16384, **{**settings(max_num_tokens=256), "max_batch_size": 32, **options}
    ) as llm:
        for block in range(-(-requests // 50)):
            asked = prompts(50, longest=300, vocab=config["vocab_size"], seed=block)
            for output in together(llm, asked, [ask(max_tokens=1 + (7 * i) % 60) for i in range(50)]):
                check_oracle(output, config)
                rows += len(output.outputs[0].routed_experts)
    return rows


@pytest.mark.parametrize("capture", ["step", "layer"])
@pytest.mark.parametrize("slots", [2, 4])
def test_rows_are_exact_when_copies_are_late(
    oracle: Oracle, capture: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trtllm_r3.enable(capture=capture, staging_slots=slots)
    monkeypatch.setattr(CudaStream, "after_current", late_copies)
    path, config = oracle
    lost = 0
    with engine(path, kv_tokens=16384, **{**settings(max_num_tokens=256), "max_batch_size": 32}) as llm:
        for output in together(llm, prompts(50, longest=300, vocab=97), [ask(max_tokens=40)] * 50):
            routes = trtllm_r3.routes_of(output.outputs[0])
            if routes.complete:
                check_oracle(output, config)
            else:
                lost += len(routes.gaps)
                assert {g.cause for g in routes.gaps} == {"staging"}
    assert slots == 2 or lost == 0, "the default ring must never run full with one step in flight"


def test_rows_are_exact_when_forwards_are_late(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine

    monkeypatch.setattr(PyTorchModelEngine, "_run", sleep_first(PyTorchModelEngine._run, every=3))
    assert run(oracle, 50) > 5000


def test_many_rows_are_exact_with_every_feature_on(oracle: Oracle) -> None:
    from tensorrt_llm.llmapi import MoeConfig

    assert run(oracle, REQUESTS, moe_config=MoeConfig(max_num_tokens=96)) > 100 * REQUESTS


def test_no_step_waits_for_the_device(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def strictly(name: str) -> None:
        real = getattr(RouteRecorder, name)

        def strict(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return real(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(RouteRecorder, name, strict)

    for name in ("begin_step", "end_step"):
        strictly(name)
    assert run(oracle, 50) > 5000
    assert len(calls) > 100
    assert not [f for f in trtllm_r3.status()["faults"] if "_step" in f or "forward" in f]
