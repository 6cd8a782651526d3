"""Waiting for the responses of a request."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..llmapi.utils import AsyncQueue


class ResponseFuture:
    """Takes responses from a queue until done: iterate (streaming), wait with `result()`, or await it."""

    id: int
    queue: Any
    aqueue: AsyncQueue | None
    _done: bool

    def _handle_response(self, response: Any) -> None:
        raise TypeError(f"{type(self).__name__} must define _handle_response")

    def _result_step(self, timeout: float | None = None) -> None:
        try:
            response = self.queue.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no response for request {self.id} within {timeout} s") from None
        self._handle_response(response)

    async def _aresult_step(self) -> None:
        if self.aqueue is None:
            raise RuntimeError("no asyncio loop ran when the request was made: use result()")
        self._handle_response(await self.aqueue.get())

    def result(self, timeout: float | None = None) -> Self:
        """Wait until all sequences have ended; TimeoutError if no response arrives for `timeout` seconds."""
        while not self._done:
            self._result_step(timeout)
        return self

    async def aresult(self) -> Self:
        """As `result`, in an asyncio loop."""
        while not self._done:
            await self._aresult_step()
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Self:
        if self._done:
            raise StopIteration
        self._result_step()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        if self._done:
            raise StopAsyncIteration
        await self._aresult_step()
        return self

    def _exception(self, timeout: float | None = None) -> RuntimeError | None:
        try:
            self.result(timeout)
        except RuntimeError as error:
            return error
        return None
