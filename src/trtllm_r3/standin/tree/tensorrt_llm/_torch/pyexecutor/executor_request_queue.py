"""Requests on their way from the caller's thread into the loop."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from typing import Any

from ..distributed import Distributed
from .llm_request import ExecutorRequest, LlmRequest, executor_request_to_llm_request
from .request_broadcast import attach_py_objects_to_requests, collect_py_objects

SHUTDOWN_REQUEST_ID = -1
CONTROL_REQUEST_ID = -2


@dataclasses.dataclass
class RequestQueueItem:
    """A request, or an instruction to the loop."""

    id: int
    request: ExecutorRequest | None = None
    _: dataclasses.KW_ONLY
    child_req_ids: list[int] | None = None
    is_canceled_request: bool = False
    query: list[int] | None = None

    @property
    def is_shutdown_request(self) -> bool:
        """Whether the loop is to end."""
        return self.id == SHUTDOWN_REQUEST_ID

    @property
    def is_normal_request(self) -> bool:
        """Whether this brings a request."""
        return not (self.is_shutdown_request or self.is_canceled_request or self.is_control_request)

    @property
    def is_control_request(self) -> bool:
        """Whether the loop is to park."""
        return self.id == CONTROL_REQUEST_ID


class ExecutorRequestQueue:
    """Takes requests from any thread and hands them to the loop, as many as it may run at once.

    Ids start at `max_batch_size`, a child's follow its parent's.
    """

    def __init__(
        self,
        dist: Distributed,
        enable_attention_dp: bool,
        max_batch_size: int,
        max_beam_width: int,
        max_num_active_requests: int,
        enable_iter_perf_stats: bool = False,
        batch_wait_timeout_ms: float = 0.0,
    ) -> None:
        self.dist = dist
        self.enable_attention_dp = enable_attention_dp
        self.max_batch_size, self.max_beam_width = max_batch_size, max_beam_width
        self.max_num_active_requests = max_num_active_requests
        self.enable_iter_perf_stats = enable_iter_perf_stats
        self.batch_wait_timeout_ms = batch_wait_timeout_ms
        self.request_queue: queue.Queue[RequestQueueItem] = queue.Queue()
        self.waiting_queue: deque[RequestQueueItem] = deque()
        self.canceled_req_ids: list[int] = []
        self.control_requests: list[RequestQueueItem] = []
        self.enqueue_lock = threading.Lock()
        self.next_request_id = max_batch_size
        self.active, self.is_shutdown = True, False
        self.start_times: dict[int, float] = {}
        self.new_active_requests_queue_latency_ms = 0.0
        self.should_exclude_last_generation_logits = False

    # ---- from any thread ----

    def enqueue_requests(self, requests: list[ExecutorRequest]) -> list[int]:
        """Add requests together; their ids. RuntimeError after a shutdown."""
        return self._enqueue_impl([(request, None) for request in requests])

    def enqueue_request(self, request: ExecutorRequest, query: list[int] | None = None) -> int:
        """Add a request; its id. RuntimeError after a shutdown."""
        return self._enqueue_impl([(request, query)])[0]

    def enqueue_cancel_request(self, req_id: int) -> None:
        """Cancel a request."""
        with self.enqueue_lock:
            self.request_queue.put(RequestQueueItem(req_id, is_canceled_request=True))

    def enqueue_shutdown_request(self) -> None:
        """End the loop when it has nothing to do; no requests are taken from now on."""
        with self.enqueue_lock:
            self.request_queue.put(RequestQueueItem(SHUTDOWN_REQUEST_ID))
            self.active = False

    def enqueue_control_request(self) -> None:
        """Park the loop when it has nothing to do. RuntimeError after a shutdown."""
        with self.enqueue_lock:
            self._check_active()
            self.request_queue.put(RequestQueueItem(CONTROL_REQUEST_ID))

    def can_enqueue_request(self) -> bool:
        """Whether requests are taken."""
        with self.enqueue_lock:
            return self.active and self.dist.rank == 0

    def close(self) -> list[RequestQueueItem]:
        """Take no more requests; those that the loop did not reach."""
        with self.enqueue_lock:
            self.active = False
            while not self.request_queue.empty():
                self.waiting_queue.append(self.request_queue.get_nowait())
            left = [item for item in self.waiting_queue if item.is_normal_request]
            self.waiting_queue.clear()
        return left

    def _enqueue_impl(self, requests: list[tuple[ExecutorRequest, list[int] | None]]) -> list[int]:
        with self.enqueue_lock:
            self._check_active()
            return [self._put(request, query) for request, query in requests]

    def _check_active(self) -> None:
        if not self.active:
            raise RuntimeError("PyExecutor has already been shutdown.")

    def _put(self, request: ExecutorRequest, query: list[int] | None) -> int:
        request_id = self._get_request_id()
        count = request.sampling_config.num_return_sequences or 1
        children = [self._get_request_id() for _ in range(count - 1)] or None
        self.start_times[request_id] = time.time()
        self.request_queue.put(RequestQueueItem(request_id, request, child_req_ids=children, query=query))
        return request_id

    def _get_request_id(self) -> int:
        current = self.next_request_id
        self.next_request_id += 1
        return current

    # ---- from the loop ----

    def fetch_new_requests(self, active_requests: list[LlmRequest]) -> list[LlmRequest]:
        """Requests to run from now on, each followed by its children. Waits if there is nothing to do."""
        idle = not (active_requests or self.waiting_queue or self.is_shutdown or self.control_requests)
        new_items = self._get_from_request_queue(None if idle else 0.0) if self.dist.rank == 0 else []
        new_items = self._handle_request_broadcasting(new_items)
        self.waiting_queue.extend(self._validate_and_filter_requests(new_items))
        room = self.max_num_active_requests - len(active_requests)
        return self._merge_requests(self._get_from_waiting_queue(room))

    def update_waiting_queue(self) -> list[RequestQueueItem]:
        """Drop cancelled requests that did not start; these."""
        gone = [item for item in self.waiting_queue if item.id in self.canceled_req_ids]
        for item in gone:
            self.start_times.pop(item.id, None)
        self.waiting_queue = deque(
            item for item in self.waiting_queue if item.id not in self.canceled_req_ids
        )
        return gone

    def get_request_queue_size(self) -> int:
        """Items that the loop has not looked at."""
        return self.request_queue.qsize()

    def get_waiting_queue_size(self) -> int:
        """Requests that wait for room."""
        return len(self.waiting_queue)

    def get_canceled_req_ids_size(self) -> int:
        """Number of requests to cancel."""
        return len(self.canceled_req_ids)

    def get_canceled_req_ids(self) -> list[int]:
        """Requests to cancel."""
        return self.canceled_req_ids

    def get_new_active_requests_queue_latency(self) -> float:
        """Milliseconds that the last started requests had waited, in all."""
        return self.new_active_requests_queue_latency_ms

    def set_exclude_last_generation_logits(self, disable_overlap_scheduler: bool, pp_size: int) -> None:
        """Tell what the loop does: with overlap a step too many is computed."""
        self.should_exclude_last_generation_logits = not disable_overlap_scheduler and pp_size == 1

    def _get_from_request_queue(self, timeout: float | None) -> list[RequestQueueItem]:
        """What is there; with timeout None, and for the batch wait, more time for it to come."""
        items: list[RequestQueueItem] = []
        if self.request_queue.empty() and timeout is not None:
            return items
        items.append(self.request_queue.get())
        self._drain(items)
        deadline = time.monotonic() + self.batch_wait_timeout_ms / 1000
        while len(items) < self.max_batch_size and items[-1].is_normal_request:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                items.append(self.request_queue.get(timeout=left))
            except queue.Empty:
                break
            self._drain(items)
        return items

    def _drain(self, items: list[RequestQueueItem]) -> None:
        while not self.request_queue.empty():
            items.append(self.request_queue.get_nowait())

    def _handle_request_broadcasting(self, new_requests: list[RequestQueueItem]) -> list[RequestQueueItem]:
        """Send rank 0's items to all ranks, with the Python attributes that pickling a request drops."""
        if self.dist.world_size == 1:
            return new_requests
        py_objects = collect_py_objects(new_requests) if self.dist.rank == 0 else ()
        new_requests, py_objects = self.dist.broadcast((new_requests, py_objects), root=0)
        if self.dist.rank != 0:
            attach_py_objects_to_requests(new_requests, py_objects)
        return new_requests

    def _validate_and_filter_requests(self, new_requests: list[RequestQueueItem]) -> list[RequestQueueItem]:
        """Take instructions out; the requests."""
        valid = []
        for item in new_requests:
            if item.is_shutdown_request:
                self.is_shutdown = True
            elif item.is_canceled_request:
                self.canceled_req_ids.append(item.id)
            elif item.is_control_request:
                self.control_requests.append(item)
            else:
                valid.append(item)
        return valid

    def _get_from_waiting_queue(self, room: int) -> list[RequestQueueItem]:
        """As many requests as there is room for, their children counted: they start with their parent."""
        items: list[RequestQueueItem] = []
        while self.waiting_queue:
            needed = 1 + len(self.waiting_queue[0].child_req_ids or [])
            if min(needed, self.max_num_active_requests) > room:
                break
            room -= needed
            items.append(self.waiting_queue.popleft())
        return items

    def _merge_requests(self, new_requests: list[RequestQueueItem]) -> list[LlmRequest]:
        now, merged = time.time(), []
        self.new_active_requests_queue_latency_ms = 0.0
        for item in new_requests:
            assert item.request is not None
            merged.extend(with_children(self.to_llm_request(item)))
            self.new_active_requests_queue_latency_ms += 1000 * (now - self.start_times.pop(item.id, now))
        return merged

    def to_llm_request(self, item: RequestQueueItem) -> LlmRequest:
        """The engine's request of an item."""
        assert item.request is not None
        return executor_request_to_llm_request(
            item.id, item.request, item.child_req_ids, self.should_exclude_last_generation_logits, item.query
        )


def with_children(request: Any) -> list[LlmRequest]:
    """A request, then its children."""
    return [request, *request.child_requests]
