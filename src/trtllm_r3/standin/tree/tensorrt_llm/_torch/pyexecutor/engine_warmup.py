"""Forwards of dummies before the first request. Part of `model_engine`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...logger import logger
from .scheduler import ScheduledRequests
from .streams import synchronize

if TYPE_CHECKING:
    from .cuda_graph_runner import CUDAGraphRunner
    from .kv_cache_manager import KVCacheManager
    from .llm_request import LlmRequest
    from .resource_manager import ResourceManager

_DUMMY_PROMPT = 512  # long prompts cost time and teach the tuner nothing more about a step's rows


class EngineWarmup:
    """Warm-up of a model engine: a step of as many tokens as may be, then each graph, the largest first."""

    llm_args: Any
    batch_size: int
    max_num_tokens: int
    max_seq_len: int
    is_warmup: bool
    kv_cache_manager_key: Any
    cuda_graph_runner: CUDAGraphRunner
    _cuda_graph_batch_sizes: list[int]

    def forward(self, scheduled_requests: ScheduledRequests, resource_manager: ResourceManager) -> Any:
        """Run a batch."""
        raise TypeError(f"{type(self).__name__} does not run batches")

    def warmup(self, resource_manager: ResourceManager) -> None:
        """Run all warm-up forwards; `is_warmup` is True meanwhile. Nothing is done without a KV cache."""
        if resource_manager.get_resource_manager(self.kv_cache_manager_key) is None:
            return
        before, self.is_warmup = self.is_warmup, True
        try:
            self._run_autotuner_warmup(resource_manager)
            self._run_cuda_graph_warmup(resource_manager)
        finally:
            self.is_warmup = before

    def _run_autotuner_warmup(self, resource_manager: ResourceManager) -> None:
        if self.llm_args.enable_autotuner:
            lengths = self._dummy_prompt_lengths(resource_manager)
            with self._warmup_batch(resource_manager, lengths, is_gen=False) as batch:
                self._forward_dummies(batch, resource_manager)

    def _run_cuda_graph_warmup(self, resource_manager: ResourceManager) -> None:
        for size in reversed(self._cuda_graph_batch_sizes):
            manager: KVCacheManager = resource_manager.get_resource_manager(self.kv_cache_manager_key)
            if manager.get_num_free_blocks() < size:
                logger.info(f"no room in the KV cache to record a graph of {size} sequences")
                continue
            with self._warmup_batch(resource_manager, [1] * size, is_gen=True) as batch:
                self._forward_dummies(batch, resource_manager)

    def _dummy_prompt_lengths(self, resource_manager: ResourceManager) -> list[int]:
        """Prompts that make up `max_num_tokens`, or what the KV cache has room for."""
        manager: KVCacheManager = resource_manager.get_resource_manager(self.kv_cache_manager_key)
        per_request = -(-self.max_num_tokens // self.batch_size)
        length = min(max(per_request, _DUMMY_PROMPT), self.max_seq_len)
        blocks, left = manager.get_num_free_blocks(), self.max_num_tokens
        lengths: list[int] = []
        while left and blocks and len(lengths) < self.batch_size:
            size = min(length, left, blocks * manager.tokens_per_block)
            lengths.append(size)
            left, blocks = left - size, blocks - -(-size // manager.tokens_per_block)
        return lengths

    @contextlib.contextmanager
    def _warmup_batch(
        self, resource_manager: ResourceManager, token_nums: list[int], is_gen: bool
    ) -> Iterator[ScheduledRequests]:
        """A batch of dummies with these numbers of tokens, whose blocks are given back at the end."""
        manager: KVCacheManager = resource_manager.get_resource_manager(self.kv_cache_manager_key)
        batch = ScheduledRequests()
        dummies: list[LlmRequest] = manager.add_dummy_requests(
            list(range(len(token_nums))), token_nums, is_gen
        )
        if is_gen:
            batch.generation_requests = dummies
        else:
            batch.context_requests = dummies
        try:
            yield batch
        finally:
            for dummy in dummies:
                manager.free_resources(dummy)

    def _forward_dummies(self, batch: ScheduledRequests, resource_manager: ResourceManager) -> None:
        self.forward(batch, resource_manager)
        synchronize()
