"""Moves responses from the engine to who waits for them. Imported from `base_worker`."""

from __future__ import annotations

import datetime
from queue import Queue
from typing import TYPE_CHECKING, Any

from ..llmapi.utils import AsyncQueue, _SyncQueue
from ..logger import logger
from .utils import ErrorResponse, RequestError

if TYPE_CHECKING:
    from .base_worker import BaseWorker


class AwaitResponseHelper:
    """The task of the worker's response thread."""

    def __init__(self, worker: BaseWorker) -> None:
        self.worker = worker
        self.temp_error_responses: Queue[ErrorResponse] = Queue()

    def __call__(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` (default 0.1) seconds for responses and pass them on; False when the engine is dead."""
        engine = self.worker.engine
        try:
            responses = list(engine.await_responses(timeout=datetime.timedelta(seconds=timeout or 0.1)))
        except Exception as error:
            return self._fail_all(error)
        responses = [r for r in map(self.worker._engine_response_callback, responses) if r is not None]
        while not self.temp_error_responses.empty():
            responses.append(self.temp_error_responses.get())
        self.responses_handler(responses)
        if not responses and engine.is_shutdown and not self.worker.doing_shutdown:
            return self._fail_all(RuntimeError("the engine's loop has ended"))
        return True

    def responses_handler(self, responses: list[Any]) -> None:
        """Pass responses on: to each request's own queue, or in one message to the proxy."""
        if self.worker.result_queue is None:
            self.handle_for_worker(responses)
        else:
            self.handle_for_ipc_batched(responses)

    def handle_for_worker(self, responses: list[Any]) -> None:
        """Put each response into the queue of its request; wake the asyncio loops once for all."""
        waiting: list[_SyncQueue] = []
        for response in responses:
            queue = self.worker.return_queue(response.client_id)
            if queue is None:
                continue
            queue.put_nowait(response)
            if isinstance(queue, _SyncQueue):
                waiting.append(queue)
            if _is_last(response):
                self.worker._pop_result(response.client_id)
        notify(waiting)

    def handle_for_ipc_batched(self, responses: list[Any]) -> None:
        """Send all responses to the proxy in one message."""
        batch: list[Any] = []
        for response in responses:
            if not isinstance(response, ErrorResponse):
                if self.worker._has_background_error():
                    response = self.worker._create_error_response(response)
                elif response.has_error():
                    response = ErrorResponse(response.client_id, response.error_msg, response.request_id)
            batch.append(response)
            if _is_last(response):
                self.worker._pop_result(response.client_id)
        if batch and self.worker.result_queue is not None:
            self.worker.result_queue.put(batch)

    def _fail_all(self, error: BaseException) -> bool:
        """Answer every waiting request with an error, so that nobody waits for a dead engine; end the thread."""
        logger.error(f"the engine died: {error!r}")
        failed = [
            ErrorResponse(client_id, RequestError(f"the engine died: {error}"), client_id)
            for client_id in list(self.worker._results)
        ]
        self.responses_handler(failed)
        self.worker._error_queue.put(error)
        return False


def notify(queues: list[_SyncQueue]) -> None:
    """Wake the readers of these queues, once for each asyncio loop; a loop that has ended has no readers."""
    for loop in {queue.loop for queue in queues}:
        try:
            _SyncQueue.notify_many(loop, [queue for queue in queues if queue.loop is loop])
        except AsyncQueue.EventLoopShutdownError:
            logger.debug("responses for an asyncio loop that has ended")


def _is_last(response: Any) -> bool:
    return isinstance(response, ErrorResponse) or response.has_error() or response.result.is_final
