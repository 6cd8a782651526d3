"""From an engine's options to its executor."""

from __future__ import annotations

import copy
from typing import Any

from ..attention_backend.interface import AttentionRuntimeFeatures
from ..distributed import Distributed
from ._util import KvCacheCreator, create_ctx_chunk_config, create_py_executor_instance, instantiate_sampler
from .model_engine import PyTorchModelEngine
from .py_executor import PyExecutor
from .streams import new_stream


def create_py_executor(
    llm_args: Any,
    checkpoint_dir: str | None = None,
    tokenizer: Any = None,
    profiling_stage_data: Any = None,
) -> PyExecutor:
    """The executor of an engine, its loop running. ValueError for options that can't be honoured.

    Without `kv_cache_config.max_tokens` it is built twice, first to find out the size of the KV cache.
    """
    args = _with_sizes(llm_args)
    mapping = args.parallel_config.to_mapping()
    dist = Distributed.get(mapping)
    features = AttentionRuntimeFeatures(
        chunked_prefill=args.enable_chunked_prefill, cache_reuse=args.kv_cache_config.enable_block_reuse
    )
    model_engine = PyTorchModelEngine(
        model_path=checkpoint_dir or str(args.model),
        llm_args=args,
        mapping=mapping,
        attn_runtime_features=features,
        dist=dist,
    )
    return build_executor(args, model_engine, dist)


def build_executor(llm_args: Any, model_engine: PyTorchModelEngine, dist: Distributed) -> PyExecutor:
    """The executor of a model engine, its loop running."""
    net_max_seq_len = model_engine.max_seq_len
    # the overlap scheduler computes one token more than a sequence gets
    model_engine.max_seq_len = net_max_seq_len + (not llm_args.disable_overlap_scheduler)
    creator = KvCacheCreator(
        model_engine=model_engine,
        mapping=model_engine.mapping,
        kv_cache_config=llm_args.kv_cache_config,
        max_seq_len=model_engine.max_seq_len,
        max_num_tokens=model_engine.max_num_tokens,
        max_batch_size=model_engine.batch_size,
    )
    options: dict[str, Any] = {
        "dist": dist,
        "mapping": model_engine.mapping,
        "llm_args": llm_args,
        "ctx_chunk_config": create_ctx_chunk_config(llm_args),
        "model_engine": model_engine,
        "execution_stream": new_stream(),
        "scheduler_policy": llm_args.scheduler_config.capacity_scheduler_policy._to_pybind(),
        "start_worker": False,
    }
    resources: dict[Any, Any] = {}
    if creator.try_prepare_estimation():
        creator.build_managers(resources, estimating_kv_cache=True)
        estimator = _create(resources, net_max_seq_len, creator.max_seq_len, options)
        creator.configure_kv_cache_capacity(estimator)
        creator.teardown_managers(resources)
    creator.build_managers(resources)
    executor = _create(resources, net_max_seq_len, creator.max_seq_len, options)
    executor.start_worker()
    return executor


def _create(
    resources: dict[Any, Any], net_max_seq_len: int, kv_max_seq_len: int, options: dict[str, Any]
) -> PyExecutor:
    max_seq_len = min(net_max_seq_len, kv_max_seq_len)
    sampler = instantiate_sampler(options["model_engine"], max_seq_len)
    return create_py_executor_instance(
        resources=resources, sampler=sampler, max_seq_len=max_seq_len, **options
    )


def _with_sizes(llm_args: Any) -> Any:
    """The options with the sizes that stock fills in where None was given."""
    args = copy.copy(llm_args)
    args.max_batch_size = args.max_batch_size or 2048
    args.max_num_tokens = args.max_num_tokens or 8192
    return args
