"""Chooses among admitted requests those whose tokens fit into one step. Imported from `scheduler`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from ...bindings.executor import ContextChunkingPolicy
from .llm_request import LlmRequest, LlmRequestState

Batch = tuple[list[LlmRequest], list[LlmRequest]]  # contexts, generations


class ContextChunkingConfig(NamedTuple):
    """How prompts are split; a chunk that isn't the last is a multiple of `chunk_unit_size` tokens."""

    policy: ContextChunkingPolicy
    chunk_unit_size: int


class MicroBatchScheduler(ABC):
    """Fills a step."""

    @abstractmethod
    def schedule(self, active_requests: list[LlmRequest], inflight_request_ids: set[int]) -> Batch:
        """Prompts, with their chunk sizes set, and generations of the step."""


class BindMicroBatchScheduler(MicroBatchScheduler):
    """Generations first, then prompts in order, up to `max_batch_size` requests and `max_num_tokens` tokens.

    Without a chunk config only a prompt of more than `max_num_tokens` is split, as one can become by pauses.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_num_tokens: int,
        ctx_chunk_config: ContextChunkingConfig | tuple[Any, int] | None = None,
        tokens_per_block: int = 32,
    ) -> None:
        self.max_batch_size, self.max_num_tokens = max_batch_size, max_num_tokens
        self.ctx_chunk_config: ContextChunkingConfig | None = None
        unit = tokens_per_block
        if ctx_chunk_config is not None:
            policy, unit = ctx_chunk_config
            self.ctx_chunk_config = ContextChunkingConfig(ContextChunkingPolicy[policy.name], unit)
        self._unit = min(unit, max_num_tokens)

    def schedule(self, active_requests: list[LlmRequest], inflight_request_ids: set[int]) -> Batch:
        """See the base class."""
        candidates = [r for r in active_requests if r.py_request_id not in inflight_request_ids]
        generations = [r for r in candidates if r.state == LlmRequestState.GENERATION_IN_PROGRESS]
        generations = generations[: min(self.max_batch_size, self.max_num_tokens)]
        prompts = [r for r in candidates if r.is_context_init_state]
        prompts = prompts[: self.max_batch_size - len(generations)]
        for request in prompts:
            request.context_chunk_size = request.context_remaining_length
        capacity = self.max_num_tokens - len(generations)
        if self.ctx_chunk_config is None:
            return self._whole(prompts, capacity), generations
        return self._chunked(prompts, capacity, self.ctx_chunk_config.policy), generations

    def _whole(self, prompts: list[LlmRequest], capacity: int) -> list[LlmRequest]:
        chosen: list[LlmRequest] = []
        for request in prompts:
            if request.context_chunk_size > self.max_num_tokens and not chosen:
                request.context_chunk_size = capacity // self._unit * self._unit
            if not 0 < request.context_chunk_size <= capacity:
                break
            capacity -= request.context_chunk_size
            chosen.append(request)
        return chosen

    def _chunked(
        self, prompts: list[LlmRequest], capacity: int, policy: ContextChunkingPolicy
    ) -> list[LlmRequest]:
        if sum(request.context_chunk_size for request in prompts) <= capacity:
            return prompts
        if policy is ContextChunkingPolicy.EQUAL_PROGRESS:
            self._share(prompts, capacity)
        else:
            self._serve(prompts, capacity)
        chosen = [request for request in prompts if request.context_chunk_size > 0]
        return sorted(chosen, key=lambda request: request.is_last_context_chunk)

    def _serve(self, prompts: list[LlmRequest], capacity: int) -> None:
        """First come, first served."""
        for request in prompts:
            wanted = request.context_remaining_length
            size = wanted if wanted <= capacity else capacity // self._unit * self._unit
            request.context_chunk_size = size
            capacity -= size

    def _share(self, prompts: list[LlmRequest], capacity: int) -> None:
        """One unit to each in turn, until nobody can take another."""
        for request in prompts:
            request.context_chunk_size = 0
        moved = True
        while moved:
            moved = False
            for request in prompts:
                before = request.context_chunk_size
                request.context_chunk_size = before + self._unit
                taken = request.context_chunk_size - before
                if taken > capacity:
                    request.context_chunk_size = before
                elif taken:
                    capacity, moved = capacity - taken, True
