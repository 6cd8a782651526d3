"""Statistics of iterations. Part of PyExecutor."""

from __future__ import annotations

import datetime as dt
import sys
from typing import Any

import torch

from .executor_state import BatchState, ExecutorState
from .llm_request import LlmRequest


class IterationStats(ExecutorState):
    """One dictionary of numbers for each iteration, with the names that stock's JSON has."""

    def _get_init_iter_stats(self, num_new_active_requests: int) -> dict[str, Any]:
        """What is known before the step."""
        request_queue = self.executor_request_queue
        return {
            "timestamp": dt.datetime.now().strftime("%m-%d-%Y %H:%M:%S.%f"),
            "numNewActiveRequests": num_new_active_requests,
            "newActiveRequestsQueueLatencyMS": request_queue.get_new_active_requests_queue_latency(),
            "numActiveRequests": len(self.active_requests),
            "maxNumActiveRequests": self.max_num_active_requests,
        }

    def _process_iter_stats(self, batch: BatchState, finished: list[LlmRequest], seconds: float) -> None:
        """Fill in the rest after the step was answered, and publish it."""
        scheduled = batch.sample_state.scheduled_requests
        inflight = {
            "numScheduledRequests": scheduled.batch_size,
            "numContextRequests": len(scheduled.context_requests),
            "numGenRequests": len(scheduled.generation_requests),
            "numPausedRequests": len(scheduled.paused_requests),
            "numCtxTokens": sum(_chunk_tokens(request) for request in scheduled.context_requests),
        }
        if self.print_log:
            line = {"iter": self.iter_counter, "host_step_time_ms": round(1000 * seconds, 3), **inflight}
            print(", ".join(f"{name} = {value}" for name, value in line.items()), file=sys.stderr)
        if batch.iter_stats is None:
            return
        stats = {
            **batch.iter_stats,
            "iter": self.iter_counter,
            "iterLatencyMS": 1000 * seconds,
            "numQueuedRequests": self.executor_request_queue.get_request_queue_size(),
            "numCompletedRequests": len(finished),
            "gpuMemUsage": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
            "kvCacheStats": self._kv_cache_stats(),
            "inflightBatchingStats": inflight,
        }
        if self.enable_iter_req_stats:
            stats["requestStats"] = [_request_stats(r) for r in (*self.active_requests, *finished)]
        with self.stats_lock:
            self.stats.append(stats)

    def _kv_cache_stats(self) -> dict[str, int]:
        manager = self.kv_cache_manager
        free = manager.get_num_free_blocks()
        return {
            "maxNumBlocks": manager.blocks_in_primary_pool,
            "freeNumBlocks": free,
            "usedNumBlocks": manager.blocks_in_primary_pool - free,
            "tokensPerBlock": manager.tokens_per_block,
        }

    def get_latest_iteration_stats(self) -> list[dict[str, Any]]:
        """Statistics of the iterations since the last call, oldest first; needs `enable_iter_perf_stats`."""
        with self.stats_lock:
            latest = list(self.stats)
            self.stats.clear()
        return latest


def _chunk_tokens(request: LlmRequest) -> int:
    begin, end = request.py_last_context_chunk
    return (end or 0) - (begin or 0)


def _request_stats(request: LlmRequest) -> dict[str, Any]:
    return {
        "id": request.py_request_id,
        "stage": request.state.name,
        "contextPrefillPosition": request.context_current_position,
        "numGeneratedTokens": request.get_num_tokens(0) - request.py_orig_prompt_len,
        "scheduled": request.py_seq_slot is not None,
        "reusedBlocksPerRequest": request.perf_metrics.kv_cache_metrics.num_reused_blocks,
    }
