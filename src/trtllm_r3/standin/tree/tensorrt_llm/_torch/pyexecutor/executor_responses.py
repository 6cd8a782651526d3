"""How requests leave the loop. Part of PyExecutor."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from ...logger import logger
from .executor_request_queue import RequestQueueItem, with_children
from .executor_state import ExecutorState
from .llm_request import FinishReason, LlmRequest, LlmRequestState, LlmResponse

Responses = list[tuple[int, LlmResponse]]


class ExecutorResponses(ExecutorState):
    """Responses, cancels and errors. Waiters are woken by each, and by the end of the loop."""

    # ---- from any thread ----

    def _await_any_response(self, timeout: float | None) -> list[LlmResponse]:
        """All responses, waiting up to `timeout` seconds for the first. RuntimeError if the loop died."""
        with self.response_cv:
            self.response_cv.wait_for(lambda: self.responses or self.is_shutdown, timeout)
            found = [response for part in self.responses.values() for response in part]
            self.responses = {}
            if not found:
                self._raise_if_dead()
        return found

    def _await_single_response(self, id: int, timeout: float | None) -> list[LlmResponse]:
        """Responses of one request, [] if none came in time. RuntimeError if the loop died without one."""
        with self.response_cv:
            self.response_cv.wait_for(lambda: id in self.responses or self.is_shutdown, timeout)
            found = self.responses.pop(id, [])
            if not found:
                self._raise_if_dead()
        return found

    def _raise_if_dead(self) -> None:
        if self.loop_error is not None:
            raise RuntimeError(f"the engine's loop died: {self.loop_error!r}") from self.loop_error

    # ---- in the loop ----

    def _enqueue_responses(self, responses: Iterable[tuple[int, LlmResponse]]) -> None:
        """Hand responses to the waiters."""
        if self.dist.world_size > 1 and self.enable_attention_dp:
            gathered = self.dist.tp_gather(list(responses))
            responses = [pair for part in gathered for pair in part] if self.dist.rank == 0 else []
        if self.dist.rank != 0:
            return
        with self.response_cv:
            for request_id, response in responses:
                self.responses.setdefault(request_id, []).append(response)
            self.response_cv.notify_all()

    def _handle_responses(self) -> list[LlmRequest]:
        """Answer active requests where there is something to say; free those that ended after that."""
        responses: Responses = []
        finished: list[LlmRequest] = []
        going_on: list[LlmRequest] = []
        for request in self.active_requests:
            if request.is_attention_dp_dummy:
                finished.append(request)
                continue
            request.decoding_iter = request.py_decoding_iter
            if request.return_perf_metrics and request.py_decoding_iter >= 1:
                request.perf_metrics.token_added(self.iter_counter, request.is_finished)
            response = request.create_response(False, self.dist.rank) if self._is_due(request) else None
            if response is not None:
                responses.append((request.py_request_id, response))
            ended = response is not None and request.is_finished
            (finished if ended else going_on).append(request)
        self.active_requests[:] = going_on
        self._enqueue_responses(responses)
        for request in finished:
            self._terminate_request(request)
        return finished

    def _is_due(self, request: LlmRequest) -> bool:
        iteration = request.py_decoding_iter
        return iteration == 1 or request.is_finished or iteration % self.stream_interval == 0

    def _terminate_request(self, request: LlmRequest) -> None:
        """Let go of what a request holds."""
        self._do_terminate_request(request)

    def _do_terminate_request(self, request: LlmRequest) -> None:
        self.resource_manager.free_resources(request)

    def _handle_canceled_requests(self) -> None:
        """End requests that were cancelled; they are answered and freed as all that end."""
        if self.executor_request_queue.get_canceled_req_ids_size() == 0:
            return
        self._cancel_waiting(self.executor_request_queue.update_waiting_queue())
        cancelled = set(self.executor_request_queue.get_canceled_req_ids())
        for request in self.active_requests:
            request_id = request.parent_request_id if request.is_child else request.py_request_id
            if request_id in cancelled and self._try_cancel_request(request):
                request.finish_by_reason(FinishReason.CANCELLED)
                request.decoding_iter = request.py_decoding_iter
        self.executor_request_queue.canceled_req_ids.clear()

    def _try_cancel_request(self, request: LlmRequest) -> bool:
        """Whether a request can end now: not if it has ended by itself."""
        return not request.is_finished

    def _cancel_waiting(self, items: list[RequestQueueItem]) -> None:
        """Answer requests that never ran: no tokens, but nobody waits in vain."""
        responses: Responses = []
        for item in items:
            for request in with_children(self.executor_request_queue.to_llm_request(item)):
                request.finish_by_reason(FinishReason.CANCELLED)
                response = request.create_response(False, self.dist.rank)
                if response is not None:
                    responses.append((request.py_request_id, response))
        self._enqueue_responses(responses)

    def _handle_errors(
        self, error_msg: str | None = None, *, requests: list[LlmRequest] | None = None
    ) -> None:
        """Fail these requests, or all active ones. The loop goes on."""
        failed = list(self.active_requests if requests is None else requests)
        for request in failed:
            request.state = LlmRequestState.GENERATION_COMPLETE
        gone = set(map(id, failed))
        self.active_requests[:] = [request for request in self.active_requests if id(request) not in gone]
        asked = [request for request in failed if not request.is_dummy]
        self._enqueue_responses([_error_response(request, error_msg or "error") for request in asked])
        for request in failed:
            self._terminate_request(request)

    def _log_and_fail(self, where: str, error: Exception) -> None:
        """A step failed: fail every active request."""
        logger.error(f"Encountered an error in {where}: {error}")
        logger.error(traceback.format_exc())
        self._handle_errors(str(error) or type(error).__name__)

    def _executor_loop_cleanup(self, error: BaseException | None) -> None:
        """The loop has ended. If by an error, no request is left without an answer."""
        left = self.executor_request_queue.close()
        text = f"the engine's loop died: {error!r}" if error else "the engine was shut down"
        queued = [
            (item.id, LlmResponse(item.id, text, client_id=item.request.client_id))
            for item in left
            if item.request
        ]
        active = [_error_response(request, text) for request in self.active_requests]
        with self.response_cv:
            self.loop_error = error
            for request_id, response in active + queued:
                self.responses.setdefault(request_id, []).append(response)
            self.is_shutdown = True
            self.response_cv.notify_all()


def _error_response(request: LlmRequest, error_msg: str) -> tuple[int, LlmResponse]:
    request_id = request.parent_request_id if request.is_child else request.py_request_id
    assert request_id is not None
    return request.py_request_id, LlmResponse(request_id, error_msg, client_id=request.py_client_id)
