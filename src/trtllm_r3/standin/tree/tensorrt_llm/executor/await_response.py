"""Moves responses from the engine to who waits for them. Imported from `base_worker`."""

from __future__ import annotations

import datetime as dt
from queue import Queue
from typing import TYPE_CHECKING, Any

from ..llmapi.utils import AsyncQueue, _SyncQueue
from ..logger import logger
from .response_extras import wrap_with_times
from .utils import ErrorResponse, RequestError

if TYPE_CHECKING:
    from .base_worker import BaseWorker


class AwaitResponseHelper:
    """The task of the worker's response thread."""

    def __init__(self, worker: BaseWorker) -> None:
        self.worker = worker
        self.temp_error_responses: Queue[ErrorResponse] = Queue()

    def __call__(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` (0.1) s for responses and pass them on; False if the engine is dead."""
        engine = self.worker.engine
        try:
            responses = list(engine.await_responses(timeout=dt.timedelta(seconds=timeout or 0.1)))
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
            if queue is not None:
                queue.put_nowait(self._wrapped(response))
            if isinstance(queue, _SyncQueue):
                waiting.append(queue)
            self._forget_if_last(response)
        notify(waiting)

    def handle_for_ipc_batched(self, responses: list[Any]) -> None:
        """Send all responses to the proxy in one message."""
        batch = [self._sendable(response) for response in responses]
        for response in responses:
            self._forget_if_last(response)
        if batch and self.worker.result_queue is not None:
            self.worker.result_queue.put(batch)

    def _sendable(self, response: Any) -> Any:
        if isinstance(response, ErrorResponse):
            return response
        if self.worker._has_background_error():
            return self.worker._create_error_response(response)
        if response.has_error():
            return ErrorResponse(response.client_id, response.error_msg, response.request_id)
        return self._wrapped(response)

    def _wrapped(self, response: Any) -> Any:
        """The response, with its times beside it if the request asked for them."""
        waiting = self.worker._results.get(response.client_id)
        if waiting is None or isinstance(response, ErrorResponse) or response.has_error():
            return response
        return wrap_with_times(response) if waiting.sampling_params.return_perf_metrics else response

    def _forget_if_last(self, response: Any) -> None:
        if isinstance(response, ErrorResponse) or response.has_error() or response.result.is_final:
            self.worker._pop_result(response.client_id)

    def _fail_all(self, error: BaseException) -> bool:
        """Answer every waiting request with an error: nobody waits for a dead engine. Ends the thread."""
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
