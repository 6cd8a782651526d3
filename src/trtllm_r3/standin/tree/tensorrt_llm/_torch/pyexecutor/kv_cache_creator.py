"""Finds out how large the KV cache may be, and builds it. Imported from `_util`."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from ...bindings.executor import OutputConfig, Request, SamplingConfig
from ...logger import logger
from ...mapping import Mapping
from .kv_cache_manager import KVCacheManager
from .model_engine import PyTorchModelEngine
from .resource_manager import ResourceManagerType
from .streams import on_cuda

if TYPE_CHECKING:
    from .py_executor import PyExecutor

CPU_KV_CACHE_BYTES = 64 << 20
"""What `free_gpu_memory_fraction` is a fraction of where there is no GPU."""
_DUMMY_PROMPT = 512
_MAX_BLOCKS = 1 << 18  # each is a Python object, and a small model on a large GPU would get a billion of them


class KvCacheCreator:
    """Builds KV cache managers of an engine.

    Where `kv_cache_config.max_tokens` is not given, a first executor with a small cache runs dummy requests,
    and the rest of the memory is what the final cache gets (`configure_kv_cache_capacity`).
    """

    def __init__(
        self,
        *,
        model_engine: PyTorchModelEngine,
        mapping: Mapping,
        kv_cache_config: Any,
        max_seq_len: int,
        max_num_tokens: int,
        max_batch_size: int,
    ) -> None:
        self._model_engine, self._mapping = model_engine, mapping
        self._kv_cache_config = kv_cache_config.model_copy()
        self._max_seq_len, self._max_num_tokens = max_seq_len, max_num_tokens
        self._max_batch_size = max_batch_size
        self._estimation_pool_bytes = 0

    @property
    def max_seq_len(self) -> int:
        """Longest sequence that the cache holds."""
        return self._max_seq_len

    def try_prepare_estimation(self) -> bool:
        """Whether the size has to be found out; if so, the next cache is one for that."""
        if self._kv_cache_config.max_tokens is not None:
            return False
        size = self._kv_cache_config.tokens_per_block
        per_request = -(-(min(_DUMMY_PROMPT, self._max_seq_len) + 2) // size) * size
        requests = -(-self._max_num_tokens // min(_DUMMY_PROMPT, self._max_seq_len)) + 1
        self._kv_cache_config.max_tokens = max(per_request * requests, self._max_num_tokens)
        return True

    def build_managers(self, resources: dict[Any, Any], estimating_kv_cache: bool = False) -> None:
        """Put a KV cache manager into `resources`."""
        spec = self._spec()
        manager = KVCacheManager(
            self._kv_cache_config,
            num_layers=spec[0],
            num_kv_heads=spec[1],
            head_dim=spec[2],
            dtype=spec[3],
            tokens_per_block=self._kv_cache_config.tokens_per_block,
            max_seq_len=self._max_seq_len,
            max_batch_size=self._max_batch_size,
            mapping=self._mapping,
        )
        if estimating_kv_cache:
            self._estimation_pool_bytes = manager.kv_pool.nbytes
        else:
            self._max_seq_len = manager.max_seq_len
        resources[ResourceManagerType.KV_CACHE_MANAGER] = manager
        resources[ResourceManagerType.DRAFT_KV_CACHE_MANAGER] = None

    def configure_kv_cache_capacity(self, py_executor: PyExecutor) -> None:
        """Run dummies on the first executor, end it, size the next cache. RuntimeError if they fail."""
        requests = self._create_dummy_context_requests(py_executor.max_seq_len)
        ids = py_executor.enqueue_requests(requests)
        py_executor.is_warmup = True
        py_executor.start_worker()
        try:
            for responses in py_executor.await_responses(ids):
                for response in responses:
                    if response.has_error():
                        raise RuntimeError(f"estimating the KV cache failed: {response.error_msg}")
            budget = self._budget()
        finally:
            py_executor.is_warmup = False
            py_executor.shutdown()
        tokens_per_block = self._kv_cache_config.tokens_per_block
        blocks = min(max(budget // (self._bytes_per_token() * tokens_per_block), 1), _MAX_BLOCKS)
        self._kv_cache_config.max_tokens = blocks * tokens_per_block
        logger.info(f"KV cache of {blocks * tokens_per_block} tokens in {budget} bytes")

    def teardown_managers(self, resources: dict[Any, Any]) -> None:
        """Take the first executor's KV cache out of `resources` and free its memory."""
        resources[ResourceManagerType.KV_CACHE_MANAGER].shutdown()
        for key in (ResourceManagerType.KV_CACHE_MANAGER, ResourceManagerType.DRAFT_KV_CACHE_MANAGER):
            del resources[key]
        self._model_engine._release_cuda_graphs()
        self._model_engine.attn_metadata = None
        gc.collect()
        if on_cuda():
            torch.cuda.empty_cache()

    def _spec(self) -> tuple[int, int, int, torch.dtype]:
        spec: tuple[int, int, int, torch.dtype] = self._model_engine.model.model_config.kv_cache_spec()
        return spec

    def _bytes_per_token(self) -> int:
        layers, heads, width, dtype = self._spec()
        return layers * 2 * heads * width * dtype.itemsize

    def _budget(self) -> int:
        """Bytes for the final cache."""
        fraction = self._kv_cache_config.free_gpu_memory_fraction
        fraction = 0.9 if fraction is None else fraction
        if not on_cuda():
            return int(CPU_KV_CACHE_BYTES * fraction)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
        free, _ = torch.cuda.mem_get_info()
        return int((free - peak + self._estimation_pool_bytes) * fraction)

    def _create_dummy_context_requests(self, max_seq_len: int) -> list[Request]:
        """Ordinary requests with one token to generate, whose prompts fill a step."""
        length = max(min(_DUMMY_PROMPT, max_seq_len - 1, self._max_num_tokens), 1)
        count = max(min(self._max_num_tokens // length, self._max_batch_size), 1)
        vocab_size = self._model_engine.model.vocab_size_padded
        rows = torch.randint(vocab_size, (count, length), generator=torch.Generator().manual_seed(0))
        return [
            Request(
                input_token_ids=row,
                max_tokens=1,
                sampling_config=SamplingConfig(),
                output_config=OutputConfig(exclude_input_from_output=True),
                end_id=-1,
            )
            for row in rows.tolist()
        ]
