"""What all parts of PyExecutor share. The class is put together in `py_executor`."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..device import get_device
from ..distributed import Distributed
from .executor_request_queue import ExecutorRequestQueue
from .kv_cache_manager import KVCacheManager
from .llm_request import LlmRequest, LlmResponse
from .resource_manager import ResourceManager
from .sampler import Sampler, SampleState
from .scheduler import RequestScheduler

if TYPE_CHECKING:
    from .model_engine import ModelEngine


@dataclass
class BatchState:
    """A launched step whose tokens are not read; the batch is `sample_state.scheduled_requests`."""

    sample_state: SampleState
    iter_start_time: float = 0.0
    iter_stats: dict[str, Any] | None = None


class ExecutorState:
    """Attributes of a PyExecutor."""

    resource_manager: ResourceManager
    scheduler: RequestScheduler
    model_engine: ModelEngine
    sampler: Sampler
    dist: Distributed
    execution_stream: Any
    kv_cache_manager: KVCacheManager
    max_seq_len: int
    max_input_len: int
    max_batch_size: int
    max_beam_width: int
    disable_overlap_scheduler: bool

    def _init_options(self, model_engine: Any) -> None:
        self.llm_args = args = model_engine.llm_args
        self.max_num_tokens = model_engine.max_num_tokens
        self.max_num_active_requests = model_engine.get_max_num_sequences()
        self.enable_attention_dp = model_engine.mapping.enable_attention_dp
        self.enable_iter_perf_stats = args.enable_iter_perf_stats
        self.enable_iter_req_stats = args.enable_iter_req_stats
        self.print_log = args.print_iter_log
        self.stream_interval = args.stream_interval
        self.batch_wait_timeout_ms = args.batch_wait_timeout_ms
        self.batch_wait_timeout_iters = args.batch_wait_timeout_iters
        self.batch_wait_max_tokens_ratio = args.batch_wait_max_tokens_ratio
        self.max_stats_len = max(args.iter_stats_max_iterations or 1000, 1)

    def _init_state(self) -> None:
        self.active_requests: list[LlmRequest] = []
        self.inflight_req_ids: set[int] = set()
        self.expected_num_active_requests = 0
        self.previous_batch: BatchState | None = None
        self.iter_counter = self.num_scheduled_requests = 0
        self.device_id = get_device().index or 0
        self.worker_started = False
        self.worker_lock = threading.Lock()
        self.batch_wait_iters_count = 0
        self.responses: dict[int, list[LlmResponse]] = {}
        self.response_lock = threading.Lock()
        self.response_cv = threading.Condition(self.response_lock)
        self.stats: deque[dict[str, Any]] = deque(maxlen=self.max_stats_len)
        self.stats_lock = threading.Lock()
        self.is_shutdown = False
        self.loop_error: BaseException | None = None
        self.shutdown_event = threading.Event()
        self.control_request_barrier = threading.Event()
        self.control_action_done = threading.Event()

    def _init_queue(self) -> None:
        self.executor_request_queue = ExecutorRequestQueue(
            dist=self.dist,
            enable_attention_dp=self.enable_attention_dp,
            max_batch_size=self.max_batch_size,
            max_beam_width=self.max_beam_width,
            max_num_active_requests=self.max_num_active_requests,
            enable_iter_perf_stats=self.enable_iter_perf_stats,
            batch_wait_timeout_ms=self.batch_wait_timeout_ms,
        )
        self.executor_request_queue.set_exclude_last_generation_logits(
            self.disable_overlap_scheduler, self.dist.pp_size
        )
