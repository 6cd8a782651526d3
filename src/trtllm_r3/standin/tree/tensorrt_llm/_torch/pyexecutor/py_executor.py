"""The engine's loop."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from ..._utils import customized_gc_thresholds
from ...logger import logger
from ..device import get_device
from ..distributed import Distributed
from .executor_state import BatchState
from .executor_steps import ExecutorSteps
from .llm_request import (
    ExecutorRequest,
    LlmRequest,
    LlmRequestState,
    LlmResponse,
    executor_request_to_llm_request,
)
from .model_engine import ModelEngine
from .resource_manager import ResourceManager, ResourceManagerType
from .sampler import Sampler
from .scheduler import RequestScheduler
from .streams import new_stream

__all__ = [
    "BatchState",
    "LlmRequest",
    "LlmRequestState",
    "LlmResponse",
    "PyExecutor",
    "executor_request_to_llm_request",
]


class PyExecutor(ExecutorSteps):
    """Runs requests in a thread of its own, one step after another.

    With overlap a step is launched before the tokens of the last one are read. Requests are enqueued, awaited
    and cancelled from other threads. ValueError for what it can't do.
    """

    def __init__(
        self,
        resource_manager: ResourceManager,
        scheduler: RequestScheduler,
        model_engine: ModelEngine,
        sampler: Sampler,
        dist: Distributed,
        max_num_sequences: int,
        drafter: Any = None,
        disable_overlap_scheduler: bool = False,
        max_input_len: int = 0x7FFFFFFF,
        max_batch_size: int = 8,
        max_beam_width: int = 1,
        max_draft_len: int = 0,
        max_seq_len: int | None = None,
        garbage_collection_gen0_threshold: int | None = None,
        start_worker: bool = True,
        execution_stream: Any = None,
    ) -> None:
        if drafter is not None or max_draft_len or max_beam_width != 1 or dist.pp_size > 1:
            raise ValueError(
                "PyExecutor: drafter, max_draft_len, max_beam_width and pp_size are not supported"
            )
        self.execution_stream = execution_stream or new_stream()
        self.resource_manager, self.scheduler = resource_manager, scheduler
        self.model_engine, self.sampler, self.dist = model_engine, sampler, dist
        self.disable_overlap_scheduler = disable_overlap_scheduler
        self.max_num_sequences, self.max_input_len = max_num_sequences, max_input_len
        self.max_batch_size, self.max_beam_width = max_batch_size, max_beam_width
        self.garbage_collection_gen0_threshold = garbage_collection_gen0_threshold
        self.kv_cache_manager = resource_manager.get_resource_manager(ResourceManagerType.KV_CACHE_MANAGER)
        self.max_seq_len = max_seq_len or self.kv_cache_manager.max_seq_len
        self._init_options(model_engine)
        self._init_state()
        self._warm_up()
        self._init_queue()
        self.event_loop = self._executor_loop if disable_overlap_scheduler else self._executor_loop_overlap
        if start_worker:
            self.start_worker()

    def _warm_up(self) -> None:
        self.is_warmup = True
        self.model_engine.warmup(self.resource_manager)
        self.is_warmup = False

    # ---- from other threads ----

    @property
    def is_warmup(self) -> bool:
        """Whether forwards are dummies or estimates; the model engine is told."""
        return getattr(self, "_is_warmup", False)

    @is_warmup.setter
    def is_warmup(self, value: bool) -> None:
        self._is_warmup = value
        self.model_engine.is_warmup = value  # type: ignore[attr-defined]

    def start_worker(self) -> None:
        """Start the loop's thread, once."""
        with self.worker_lock:
            if not self.worker_started:
                self.worker_thread = threading.Thread(
                    target=self._event_loop_wrapper, daemon=True, name="PyExecutor"
                )
                self.worker_thread.start()
                self.worker_started = True

    def enqueue_requests(self, requests: list[ExecutorRequest]) -> list[int]:
        """Enqueue requests together; their ids. RuntimeError after a shutdown."""
        return self.executor_request_queue.enqueue_requests(requests)

    def enqueue_request(self, request: ExecutorRequest, query: list[int] | None = None) -> int:
        """Enqueue a request; its id. RuntimeError after a shutdown."""
        return self.executor_request_queue.enqueue_request(request, query)

    def await_responses(
        self, id: list[int] | int | None = None, timeout: dt.timedelta | None = None
    ) -> list[Any]:
        """Responses of any request, of one, or a list for each of several. RuntimeError if the loop died."""
        seconds = None if timeout is None else timeout.total_seconds()
        if id is None:
            return self._await_any_response(seconds)
        if isinstance(id, int):
            return self._await_single_response(id, seconds)
        return [self._await_single_response(request_id, seconds) for request_id in id]

    def cancel_request(self, id: int) -> None:
        """End a request; its answer has the tokens so far."""
        self.executor_request_queue.enqueue_cancel_request(id)

    def can_enqueue_requests(self) -> bool:
        """Whether requests are taken."""
        return self.executor_request_queue.can_enqueue_request()

    @contextlib.contextmanager
    def control_action(self) -> Iterator[PyExecutor]:
        """Within, the loop is parked: no request is active or waiting. RuntimeError after a shutdown."""
        if self.dist.rank == 0:
            self.executor_request_queue.enqueue_control_request()
        while not self.control_request_barrier.wait(0.1):
            if self.is_shutdown:
                raise RuntimeError("the engine's loop has ended")
        try:
            yield self
        finally:
            self.control_request_barrier.clear()
            self.control_action_done.set()

    def reset_prefix_cache(self) -> None:
        """Forget what the KV cache holds of earlier requests."""
        self.kv_cache_manager.reset_reuse_state()

    def shutdown(self) -> None:
        """End the loop when its requests are done, then the managers. Doing it again is harmless."""
        if not hasattr(self, "model_engine"):
            return
        if self.worker_started:
            self.executor_request_queue.enqueue_shutdown_request()
            self.shutdown_event.wait()
            self.worker_thread.join()
            self.worker_started = False
        else:
            self._executor_loop_cleanup(None)
        for manager in self.resource_manager.resource_managers.values():
            if manager:
                manager.shutdown()
        del self.model_engine

    def __enter__(self) -> PyExecutor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # ---- the loop ----

    def _event_loop_wrapper(self) -> None:
        error: BaseException | None = None
        try:
            if get_device().type == "cuda":
                torch.cuda.set_device(self.device_id)
            with customized_gc_thresholds(self.garbage_collection_gen0_threshold):
                self.event_loop()
        except BaseException as caught:
            logger.error(f"Error in event loop: {caught}")
            logger.error(traceback.format_exc())
            error = caught
        finally:
            self._executor_loop_cleanup(error)
            self.shutdown_event.set()

    def _executor_loop(self) -> None:
        while True:
            started = time.time()
            scheduled_batch, iter_stats = self._prepare_and_schedule_batch()
            if scheduled_batch is None:
                break
            self._handle_control_request()
            self._pause_requests(scheduled_batch.paused_requests)
            sample_state = None
            if self._can_queue(scheduled_batch):
                self.resource_manager.prepare_resources(scheduled_batch)
                batch_outputs = self._forward_step(scheduled_batch)
                sample_state = self._sample_async(scheduled_batch, batch_outputs)
                self._update_request_states(scheduled_batch)
                if sample_state is not None:
                    self._update_requests(sample_state)
            self._handle_canceled_requests()
            finished = self._handle_responses()
            if sample_state is not None:
                self._update_resources(scheduled_batch)
                self._finish_stats(BatchState(sample_state, started, iter_stats), finished)
            self.iter_counter += 1

    def _executor_loop_overlap(self) -> None:
        while True:
            started = time.time()
            scheduled_batch, iter_stats = self._prepare_and_schedule_batch()
            if scheduled_batch is None:
                break
            self._handle_control_request()
            self._pause_requests(scheduled_batch.paused_requests)
            sample_state = None
            can_queue = self._can_queue(scheduled_batch)
            if can_queue:
                self.resource_manager.prepare_resources(scheduled_batch)
                # requests whose last token the host knows come first, the model engine relies on it
                scheduled_batch.generation_requests.sort(key=lambda request: request.py_batch_idx is not None)
                previous = self.previous_batch.sample_state.device if self.previous_batch else None
                batch_outputs = self._forward_step(scheduled_batch, previous)
            if self.previous_batch is not None:
                self._update_requests(self.previous_batch.sample_state)
            if can_queue:
                sample_state = self._sample_async(scheduled_batch, batch_outputs)
                self._update_request_states(scheduled_batch)
            self._process_previous_batch()
            self.previous_batch = None
            if sample_state is not None:
                self.previous_batch = BatchState(sample_state, started, iter_stats)
            self.iter_counter += 1

    def _process_previous_batch(self) -> None:
        """Answer what the step before the one in flight has brought."""
        self._handle_canceled_requests()
        finished = self._handle_responses()
        if self.previous_batch is not None:
            self._update_resources(self.previous_batch.sample_state.scheduled_requests)
            self._finish_stats(self.previous_batch, finished)

    def _handle_control_request(self) -> None:
        """Park while somebody else works on the engine, once nothing is active or waiting."""
        request_queue = self.executor_request_queue
        busy = self.active_requests or request_queue.get_waiting_queue_size()
        if request_queue.control_requests and not busy:
            request_queue.control_requests.pop(0)
            self.control_request_barrier.set()
            self.control_action_done.wait()
            self.control_action_done.clear()
