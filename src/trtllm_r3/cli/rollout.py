"""The main job: prompts in, answers with their routes out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import routes_of
from ..flow.routes import Routes
from . import engine
from .prompts import BadLine, Prompt, read_prompts
from .resume import RunRefused
from .store import RunFolder


@dataclass
class Summary:
    """What one run did. `skipped`: prompts that an earlier run had finished."""

    finished: int = 0
    skipped: int = 0
    bad: int = 0
    tokens: int = 0
    rows: int = 0
    missing: int = 0
    without: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, answer: Mapping[str, Any], routes: Routes) -> None:
        """Add one answer."""
        self.tokens += len(answer["token_ids"])
        self.rows += len(routes)
        self.missing += int(routes.missing.sum())
        self.without += routes.ids is None
        for gap in routes.gaps:
            self.causes[gap.cause] = self.causes.get(gap.cause, 0) + gap.stop - gap.start


@dataclass(frozen=True)
class Progress:
    """Told of each prompt that is done with, for better or worse."""

    advance: Callable[[], None] = lambda: None
    complain: Callable[[BadLine], None] = lambda bad: None


def derived_seed(seed: int, line: int, answer: int = 0) -> int:
    """An answer's own seed: the same in every run and whatever runs beside it."""
    name = f"{seed}:{line}:{answer}" if answer else f"{seed}:{line}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


class Rollout:
    """Runs a file of prompts through an LLM into a folder."""

    def __init__(
        self,
        llm: Any,
        folder: RunFolder,
        sampling: Mapping[str, Any],
        *,
        seed: int = 0,
        in_flight: int = 256,
        progress: Progress | None = None,
    ) -> None:
        self.llm, self.folder, self.sampling = llm, folder, dict(sampling)
        self.seed, self.in_flight = seed, in_flight
        self.progress = progress or Progress()
        self.summary = Summary()

    def run(self, prompts: Path, vocab_size: int | None = None) -> Summary:
        """Run what is not finished. However it ends, finished prompts are on disk. Raises RunRefused."""
        started = time.perf_counter()
        try:
            asyncio.run(self._run(read_prompts(prompts, vocab_size)))
        finally:
            self.folder.flush()
            self.summary.seconds = time.perf_counter() - started
        return self.summary

    async def _run(self, prompts: Iterator[Prompt | BadLine]) -> None:
        running: set[asyncio.Task[None]] = set()
        try:
            for prompt in prompts:
                if isinstance(prompt, BadLine):
                    self._complain(prompt)
                elif not self._is_finished(prompt):
                    if len(running) >= self.in_flight:
                        running = await _some(running)
                    running.add(asyncio.create_task(self._one(prompt)))
                    await asyncio.sleep(0)
            while running:
                running = await _some(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one(self, prompt: Prompt) -> None:
        requests: list[Any] = []
        try:
            self._submit(prompt, requests)
            for request in requests:
                await request
            self._keep(prompt, requests)
        except asyncio.CancelledError:
            _abort(requests)
            raise
        except Exception as exc:
            if not isinstance(exc, (ValueError, TypeError)) and not engine.is_fault_of_one_request(exc):
                raise
            _abort(requests)
            self._complain(BadLine(prompt.line, str(exc), prompt.id))

    def _submit(self, prompt: Prompt, requests: list[Any]) -> None:
        """One request an answer: what ends one, a stop string for instance, must not end the others."""
        options = {**self.sampling, **prompt.sampling}
        answers = options.pop("n", None) or 1
        if answers > 1 and not any(options.get(name) for name in ("temperature", "top_p", "top_k")):
            raise ValueError(
                f"n={answers} gives the same answer each time without temperature, top_p or top_k"
            )
        for answer in range(answers):
            seed = derived_seed(options.get("seed", self.seed), prompt.line, answer)
            own = {**options, "seed": options["seed"] if "seed" in options and not answer else seed}
            params = engine.sampling_params(return_routed_experts=True, **own)
            requests.append(self.llm.generate_async(prompt.inputs, params))

    def _keep(self, prompt: Prompt, requests: list[Any]) -> None:
        outputs = [(request, request.outputs[0]) for request in requests]
        if any(output.finish_reason is None for _, output in outputs):
            raise ValueError("the engine ended the request without a reason")
        answers = [(_answer(prompt, request, output), routes_of(output)) for request, output in outputs]
        self.folder.add(prompt.line, prompt.digest, answers)
        for answer in answers:
            self.summary.count(*answer)
        self.summary.finished += 1
        self.progress.advance()

    def _is_finished(self, prompt: Prompt) -> bool:
        digest = self.folder.finished.get(prompt.line)
        if digest is None:
            return False
        if digest != prompt.digest:
            raise RunRefused(
                f"line {prompt.line} of the prompts is not what {self.folder.path} has the answer to: "
                "add new prompts at the end of the file, or choose another --out"
            )
        self.summary.skipped += 1
        self.progress.advance()
        return True

    def _complain(self, bad: BadLine) -> None:
        self.summary.bad += 1
        self.folder.report(bad)
        self.progress.complain(bad)
        self.progress.advance()


def _abort(requests: list[Any]) -> None:
    for request in requests:
        request.abort()


async def _some(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until at least one has ended; raises what it raised. Those that still run."""
    done, pending = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
    return pending


def _answer(prompt: Prompt, request: Any, output: Any) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "prompt": prompt.text,
        "prompt_token_ids": list(request.prompt_token_ids),
        "token_ids": list(output.token_ids),
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        **({} if prompt.meta is None else {"meta": prompt.meta}),
    }
