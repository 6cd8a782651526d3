"""Admits requests against the blocks of the KV cache. Imported from `scheduler`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ...bindings.executor import CapacitySchedulerPolicy
from .kv_block_tree import BlockKey
from .kv_cache_manager import KVCacheManager
from .llm_request import LlmRequest, LlmRequestState

Admitted = tuple[list[LlmRequest], list[LlmRequest]]  # fitting, paused


class CapacityScheduler(ABC):
    """Admits requests."""

    @abstractmethod
    def schedule_request(self, active_requests: list[LlmRequest]) -> Admitted:
        """Requests that fit, and running ones that have to be paused for them."""


class BindCapacityScheduler(CapacityScheduler):
    """Admits in the order of `active_requests`.

    GUARANTEED_NO_EVICT admits what can be completed, MAX_UTILIZATION what fits in the coming step (pausing
    the youngest running request where it must), STATIC_BATCH nothing new while anything runs. RuntimeError
    if nothing can ever run, for the first request does not fit into the whole cache.
    """

    def __init__(
        self,
        max_num_requests: int,
        kv_cache_manager: KVCacheManager,
        scheduler_policy: Any = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    ) -> None:
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager
        # by name: llmapi has an enum of its own
        self.scheduler_policy = CapacitySchedulerPolicy[scheduler_policy.name]

    def schedule_request(self, active_requests: list[LlmRequest]) -> Admitted:
        """See the base class."""
        candidates = [request for request in active_requests if not request.is_finished]
        if self.scheduler_policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
            fitting, paused = self._max_utilization(candidates)
        else:
            fitting, paused = self._no_evict(candidates), []
        if candidates and not fitting and not any(map(self.kv_cache_manager.held_blocks, active_requests)):
            manager, first = self.kv_cache_manager, candidates[0]
            needed = manager.get_needed_resource_to_completion(first)
            raise RuntimeError(
                f"request {first.py_request_id} needs {needed} KV blocks, "
                f"but the cache has only {manager.num_free_blocks}"
            )
        return fitting, paused

    def _no_evict(self, candidates: list[LlmRequest]) -> list[LlmRequest]:
        manager = self.kv_cache_manager
        fitting = [r for r in candidates if _is_started(r)][: self.max_num_requests]
        free = manager.num_free_blocks - sum(map(manager.remaining_blocks_to_completion, fitting))
        if fitting and self.scheduler_policy is CapacitySchedulerPolicy.STATIC_BATCH:
            return fitting
        siblings = _Siblings(manager, candidates)
        for request in candidates:
            if _is_started(request) or siblings.must_wait(request):
                continue
            free -= manager.remaining_blocks_to_completion(request)
            if free < 0 or len(fitting) >= self.max_num_requests:
                break
            fitting.append(request)
        return fitting

    def _max_utilization(self, candidates: list[LlmRequest]) -> Admitted:
        manager, siblings = self.kv_cache_manager, _Siblings(self.kv_cache_manager, candidates)
        free, index = manager.num_free_blocks, 0
        fitting: list[LlmRequest] = []
        paused: list[LlmRequest] = []
        candidates = [request for request in candidates if not siblings.must_wait(request)]
        end = len(candidates)
        while index < end:
            request = candidates[index]
            needed = manager.needed_blocks_one_step(request)
            if needed <= free and len(fitting) < self.max_num_requests:
                fitting.append(request)
                free, index = free - needed, index + 1
            else:
                youngest = _last_started(candidates, index, end)
                if youngest is None:
                    break
                paused.append(candidates[youngest])
                free, end = free + manager.held_blocks(candidates[youngest]), youngest
        return fitting, paused


class _Siblings:
    """Holds back a prompt whose next block another prompt of the same step is about to compute."""

    def __init__(self, manager: KVCacheManager, candidates: list[LlmRequest]) -> None:
        self._manager = manager
        self._coming: set[tuple[BlockKey, ...]] = set()
        for request in candidates if manager.enable_block_reuse else ():
            if request.is_context_init_state and not _is_new(request):
                self._note(request)

    def must_wait(self, request: LlmRequest) -> bool:
        """Whether the request would compute what comes into the cache anyway."""
        if not (self._manager.enable_block_reuse and request.is_context_init_state and _is_new(request)):
            return False
        return not self._note(request)

    def _note(self, request: LlmRequest) -> bool:
        path = self._manager.find_new_context_block(request)
        if path is None:
            return True
        known = path in self._coming
        self._coming.add(path)
        return not known


def _is_new(request: LlmRequest) -> bool:
    return request.context_current_position == 0


def _is_started(request: LlmRequest) -> bool:
    return not (request.is_context_init_state and _is_new(request))


def _last_started(candidates: list[LlmRequest], index: int, end: int) -> int | None:
    """Index of the last request in the range that holds blocks and goes on after the step in flight."""
    for place in range(end - 1, index - 1, -1):
        request = candidates[place]
        if _is_started(request) and request.state != LlmRequestState.GENERATION_TO_COMPLETE:
            return place
    return None
