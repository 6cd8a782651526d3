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


def derived_seed(seed: int, line: int) -> int:
    """A prompt's own seed: the same in every run and whatever runs beside it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{line}".encode()).digest()[:4], "big") >> 1


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
        request = self._submit(prompt)
        if request is None:
            return
        try:
            await request
        except asyncio.CancelledError:
            request.abort()
            raise
        except Exception as exc:
            if not engine.is_fault_of_one_request(exc):
                raise
            self._complain(BadLine(prompt.line, str(exc), prompt.id))
            return
        self._keep(prompt, request)

    def _submit(self, prompt: Prompt) -> Any:
        options = {"seed": derived_seed(self.seed, prompt.line), **self.sampling, **prompt.sampling}
        try:
            params = engine.sampling_params(return_routed_experts=True, **options)
            return self.llm.generate_async(prompt.inputs, params)
        except Exception as exc:
            if not isinstance(exc, (ValueError, TypeError)) and not engine.is_fault_of_one_request(exc):
                raise
            self._complain(BadLine(prompt.line, str(exc), prompt.id))
            return None

    def _keep(self, prompt: Prompt, request: Any) -> None:
        answers = [(_answer(prompt, request, output), routes_of(output)) for output in request.outputs]
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
