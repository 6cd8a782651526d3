"""Threads, queues and switches of the LLM API."""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

from ..logger import logger

F = TypeVar("F", bound=Callable[..., Any])


def print_traceback_on_error(func: F) -> F:
    """Decorator: log the traceback of an exception before it goes on."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception:
            logger.debug(traceback.format_exc())
            raise

    return cast(F, wrapper)


def logger_debug(message: str, color: str | None = None) -> None:
    """Log a message of the LLM API at "debug"; the colour is of no importance."""
    del color
    logger.debug(message.rstrip())


def enable_llm_debug() -> bool:
    """Whether TLLM_LLM_ENABLE_DEBUG=1 asks for more messages."""
    return os.environ.get("TLLM_LLM_ENABLE_DEBUG", "0") == "1"


def enable_worker_single_process_for_tp1() -> bool:
    """Whether TLLM_WORKER_USE_SINGLE_PROCESS=1 asks for the engine inside the caller's process."""
    return os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS", "0") == "1"


def get_device_count() -> int:
    """Number of CUDA devices."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class ManagedThread(threading.Thread):
    """A daemon thread that repeats `task` until it returns False or `stop` is called.

    An exception of the task goes into `error_queue` and the thread goes on. A task may be a `WeakMethod`:
    the thread ends when its object is gone.
    """

    def __init__(
        self,
        task: Callable[..., bool] | weakref.WeakMethod[Callable[..., bool]],
        error_queue: queue.Queue[Any],
        name: str | None = None,
        stop_event: threading.Event | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.task = task
        self.error_queue = error_queue
        self.kwargs = kwargs
        self.stop_event = stop_event or threading.Event()

    def run(self) -> None:
        """The loop."""
        while not self.stop_event.is_set():
            task = self.task() if isinstance(self.task, weakref.WeakMethod) else self.task
            if task is None:
                return
            try:
                if not task(**self.kwargs):
                    return
            except Exception as error:
                logger.error(f"Error in thread {self.name}: {error}\n{traceback.format_exc()}")
                self.error_queue.put(error)
            del task

    def stop(self) -> None:
        """Let the loop end after the current call."""
        self.stop_event.set()


class AsyncQueue:
    """A queue that threads fill (`sync_q`) and coroutines of the loop it was made in empty."""

    class EventLoopShutdownError(Exception):
        """The loop of the readers does not run any more."""

    class MixedSyncAsyncAPIError(Exception):
        """Both the blocking and the awaiting reader were used."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._event = asyncio.Event()
        self._tainted = False
        self._sync_q = _SyncQueue(self)

    @property
    def sync_q(self) -> _SyncQueue:
        """The side for threads."""
        return self._sync_q

    def full(self) -> bool:
        """Never: the queue has no bound."""
        return False

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._items

    def put_nowait(self, item: Any) -> None:
        """Append without waking a reader; any thread."""
        self._items.append(item)

    def notify(self) -> None:
        """Wake the readers if something waits; the loop's thread only."""
        if self._items:
            self._event.set()

    def unsafe_get(self) -> Any:
        """Take an item from any thread (IndexError if none waits); forbids `get` from then on."""
        self._tainted = True
        return self._items.popleft()

    async def get(self, timeout: float | None = None) -> Any:
        """Wait for an item; asyncio.TimeoutError after `timeout` seconds."""
        if self._tainted:
            raise AsyncQueue.MixedSyncAsyncAPIError
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._items:
            self._event.clear()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            await asyncio.wait_for(self._event.wait(), left)
        return self._items.popleft()


class _SyncQueue:
    """The threads' side of an `AsyncQueue`."""

    def __init__(self, owner: AsyncQueue) -> None:
        self._aq = owner
        self._loop = asyncio.get_running_loop()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the readers."""
        return self._loop

    def put_nowait(self, item: Any) -> None:
        """Append without waking a reader."""
        self._aq.put_nowait(item)

    def put(self, item: Any) -> None:
        """Append and wake the readers."""
        self._aq.put_nowait(item)
        self.notify_many(self._loop, [self])

    @staticmethod
    def notify_many(loop: asyncio.AbstractEventLoop, queues: Iterable[_SyncQueue]) -> None:
        """Wake the readers of many queues in one go; EventLoopShutdownError if the loop has ended."""
        try:
            loop.call_soon_threadsafe(_notify_all, list(queues))
        except RuntimeError:
            raise AsyncQueue.EventLoopShutdownError from None

    def full(self) -> bool:
        """Never: the queue has no bound."""
        return False

    def get(self, timeout: float | None = None) -> Any:
        """Block for an item although a loop runs in this thread; queue.Empty after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return self._aq.unsafe_get()
            except IndexError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise queue.Empty from None
                time.sleep(0.001)


def _notify_all(queues: list[_SyncQueue]) -> None:
    for waiting in queues:
        waiting._aq.notify()
