"""Builds the parts of an executor: KV cache, managers in their order, scheduler, sampler."""

from __future__ import annotations

from typing import Any

from ...bindings.executor import CapacitySchedulerPolicy, ContextChunkingPolicy
from ...mapping import Mapping
from ..distributed import Distributed
from .kv_cache_creator import KvCacheCreator
from .micro_batch_scheduler import ContextChunkingConfig
from .model_engine import PyTorchModelEngine
from .py_executor import PyExecutor
from .resource_manager import KVCacheManager, ResourceManager, ResourceManagerType
from .sampler import Sampler, TorchSampler
from .scheduler import BindCapacityScheduler, BindMicroBatchScheduler, SimpleScheduler
from .seq_slot_manager import SeqSlotManager

__all__ = [
    "KvCacheCreator",
    "create_py_executor_instance",
    "create_torch_sampler_args",
    "instantiate_sampler",
]


def create_py_executor_instance(
    *,
    dist: Distributed,
    resources: dict[Any, Any],
    mapping: Mapping,
    llm_args: Any,
    ctx_chunk_config: ContextChunkingConfig | None,
    model_engine: PyTorchModelEngine,
    start_worker: bool,
    sampler: Sampler,
    max_seq_len: int | None = None,
    max_batch_size: int | None = None,
    max_num_tokens: int | None = None,
    execution_stream: Any = None,
    scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
) -> PyExecutor:
    """An executor with the managers of `resources`, those of `llm_args.extra_resource_managers` and slots.

    `resources` is extended; the KV cache comes last. ValueError for an extra manager whose key is taken.
    """
    batch_size = max_batch_size or model_engine.batch_size
    max_num_sequences = batch_size * mapping.pp_size
    resource_manager = _order_managers(resources, llm_args.extra_resource_managers, max_num_sequences)
    kv_cache: KVCacheManager = resources[ResourceManagerType.KV_CACHE_MANAGER]
    num_tokens, block = max_num_tokens or model_engine.max_num_tokens, kv_cache.tokens_per_block
    scheduler = SimpleScheduler(
        BindCapacityScheduler(max_num_sequences, kv_cache, scheduler_policy),
        BindMicroBatchScheduler(batch_size, num_tokens, ctx_chunk_config, block),
    )
    return PyExecutor(
        resource_manager,
        scheduler,
        model_engine,
        sampler,
        dist,
        max_num_sequences,
        disable_overlap_scheduler=llm_args.disable_overlap_scheduler,
        max_batch_size=batch_size,
        max_seq_len=max_seq_len,
        garbage_collection_gen0_threshold=llm_args.garbage_collection_gen0_threshold,
        start_worker=start_worker,
        execution_stream=execution_stream,
    )


def _order_managers(
    resources: dict[Any, Any], extra: dict[Any, Any], max_num_sequences: int
) -> ResourceManager:
    for key, value in extra.items():
        if key in resources:
            raise ValueError(f"Cannot overwrite existing resource manager {key}.")
        resources[key] = value
    resources[ResourceManagerType.SEQ_SLOT_MANAGER] = SeqSlotManager(max_num_sequences)
    resource_manager = ResourceManager(resources)
    resource_manager.resource_managers.move_to_end(ResourceManagerType.KV_CACHE_MANAGER, last=True)
    return resource_manager


def create_ctx_chunk_config(llm_args: Any) -> ContextChunkingConfig | None:
    """How prompts are split, None if they are not."""
    if not llm_args.enable_chunked_prefill:
        return None
    policy = llm_args.scheduler_config.context_chunking_policy
    chosen = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED if policy is None else policy._to_pybind()
    return ContextChunkingConfig(chosen, llm_args.kv_cache_config.tokens_per_block)


def create_torch_sampler_args(max_seq_len: int, max_num_sequences: int) -> TorchSampler.Args:
    """Sizes of the sampler."""
    return TorchSampler.Args(max_seq_len=max_seq_len, max_num_sequences=max_num_sequences)


def instantiate_sampler(engine: PyTorchModelEngine, max_seq_len: int) -> TorchSampler:
    """The sampler of an engine; sequences end at `max_seq_len`."""
    return TorchSampler(create_torch_sampler_args(max_seq_len, engine.get_max_num_sequences()))
