"""Statistics of the engine's iterations, on their way to the user."""

from __future__ import annotations

import asyncio
import json
from queue import Empty, Queue
from typing import Any

from ..llmapi.utils import AsyncQueue
from .utils import has_event_loop


class IterationResult:
    """A queue of JSON texts, read as dictionaries until nothing comes for `timeout` seconds."""

    def __init__(self) -> None:
        self._done = False
        self._timeout: float | None = 2
        self.aqueue = AsyncQueue() if has_event_loop() else None
        self.queue: Any = self.aqueue.sync_q if self.aqueue is not None else Queue()

    def set_timeout(self, timeout: float | None) -> None:
        """How long to wait for more."""
        self._timeout = timeout

    def mark_undone(self) -> None:
        """Expect more: a prompt was submitted."""
        self._done = False

    def get_results(self) -> list[dict[str, Any]]:
        """All that arrives until the timeout."""
        results = []
        while not self._done:
            try:
                results.append(json.loads(self.queue.get(timeout=self._timeout)))
            except Empty:
                self._done = True
        return results

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        if self.aqueue is None:
            raise RuntimeError("no asyncio loop ran when the first prompt was submitted")
        try:
            item: dict[str, Any] = json.loads(await self.aqueue.get(timeout=self._timeout))
            return item
        except asyncio.TimeoutError:
            self._done = True
            raise StopAsyncIteration from None
