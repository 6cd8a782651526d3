"""An engine without a model, whose routes are a function of the token and its position, for fast tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import trtllm_r3
from trtllm_r3.cli import engine
from trtllm_r3.flow.routes import Gap, Routes, Run
from trtllm_r3.trtllm.responses import RouteOutputs

LAYERS, TOP_K, EXPERTS = 3, 2, 300


def expected_routes(tokens: list[int]) -> torch.Tensor:
    """int16 [S - 1, L, K] of a sequence: a formula, different for each row, layer and slot."""
    token, position = torch.tensor(tokens[:-1]).view(-1, 1, 1), torch.arange(len(tokens) - 1).view(-1, 1, 1)
    layer, slot = torch.arange(LAYERS).view(1, -1, 1), torch.arange(TOP_K).view(1, 1, -1)
    return ((token + 7 * position + 31 * layer + 100 * slot) % EXPERTS).to(torch.int16)


class FakeRequest:
    """Ends after a moment with three tokens, unless its text says something else."""

    def __init__(self, llm: FakeLLM, prompt: list[int], params: Any) -> None:
        self.llm, self.prompt_token_ids, self.params = llm, prompt, params
        self.outputs: list[Any] = []

    def __await__(self) -> Any:
        return self._end().__await__()

    async def _end(self) -> None:
        await asyncio.sleep(0.001 * (self.params.seed % 4))
        self.llm.on_end(self)
        self.outputs = [self._output(i) for i in range(self.params.n)]

    def _output(self, index: int) -> Any:
        answer = [self.params.seed % 97 + index, 5, 6]
        ids = expected_routes([*self.prompt_token_ids, *answer])
        routes = (
            Routes(ids, 0, (1, 2, 4), EXPERTS, (Gap(0, 1, "prefix"),), (Run(0, len(ids), 0),))
            if self.llm.routes
            else Routes(None, why_none="stopped in text")
        )
        if self.llm.routes:
            ids[0] = -1
        extra = RouteOutputs()
        extra.routes = routes
        return SimpleNamespace(
            token_ids=answer, text="\u2028é", finish_reason="length", stop_reason=None,
            additional_generation_outputs=extra,
        )  # fmt: skip

    def abort(self) -> None:
        self.llm.aborted += 1


class FakeLLM:
    """Takes the place of an LLM. `on_end` is called when a request ends, and may raise."""

    def __init__(self) -> None:
        self.tokenizer, self.routes, self.aborted, self.asked = object(), True, 0, 0
        self.on_end: Callable[[FakeRequest], None] = lambda request: None
        self.shut_down = False

    def generate_async(self, inputs: str | list[int], params: Any) -> FakeRequest:
        assert params.return_routed_experts
        tokens = [ord(c) % 500 for c in inputs] if isinstance(inputs, str) else inputs
        if len(tokens) > 100:
            raise ValueError(f"prompt of {len(tokens)} tokens exceeds max_num_tokens (100)")
        self.asked += 1
        return FakeRequest(self, tokens, params)

    def shutdown(self) -> None:
        self.shut_down = True


@pytest.fixture
def llm(standin: str, monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The engine that the commands build in this test."""
    fake = FakeLLM()

    def build(options: Any, routes: bool = True) -> FakeLLM:
        return fake

    trtllm_r3.enable()
    monkeypatch.setattr(engine, "build", build)
    return fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory that only its configuration lives in."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": 500, "eos_token_id": 2}))
    return path


@pytest.fixture
def rollout(model: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs `trtllm-r3 rollout` in this process on these lines; the folder is `tmp_path / "out"`."""

    def run(lines: list[Any], *options: str) -> Any:
        from trtllm_r3.cli.app import app

        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "prompts.jsonl").write_text("\n".join(text) + "\n")
        where = [
            "--model",
            str(model),
            "--prompts",
            str(tmp_path / "prompts.jsonl"),
            "--out",
            str(tmp_path / "out"),
        ]
        return CliRunner().invoke(app, ["rollout", *where, *options])

    return run
