"""The paged KV cache of the model's layers. Imported from `resource_manager`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from ...bindings.executor import FinishReason, SamplingConfig
from ...mapping import Mapping
from ..device import get_device
from .kv_block_manager import KvBlockManager, OutOfBlocks
from .kv_block_tree import BlockKey, BlockScope
from .llm_request import LlmRequest, LlmRequestState
from .resource_base import BaseResourceManager

if TYPE_CHECKING:
    from .scheduler import ScheduledRequests


class KVCacheManager(BaseResourceManager):
    """Blocks of `tokens_per_block` tokens in one pool, shared by equal prefixes if `enable_block_reuse`.

    A hit shows before the request's first step: `prepopulated_prompt_len` and `context_current_position` are
    the number of prompt tokens found. `max_tokens` is the pool's size, by default that of `kv_cache_config`:
    ValueError without.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        kv_cache_type: str = "SELF",
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        tokens_per_block: int,
        max_seq_len: int,
        max_batch_size: int,
        mapping: Mapping | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        max_tokens: int | None = None,
    ) -> None:
        max_tokens = max_tokens or kv_cache_config.max_tokens
        if not max_tokens:
            raise ValueError("kv_cache_config.max_tokens is not set: the KV cache has no size")
        self.kv_cache_type, self.mapping, self.dtype = kv_cache_type, mapping or Mapping(), dtype
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.tokens_per_block = tokens_per_block
        self.blocks_in_primary_pool = -(-int(max_tokens) // tokens_per_block)
        self.max_tokens = self.blocks_in_primary_pool * tokens_per_block
        self.max_seq_len = min(max_seq_len, self.max_tokens)
        self.max_batch_size = max_batch_size
        self.max_blocks_per_seq = -(-self.max_seq_len // tokens_per_block)
        self.enable_block_reuse = bool(kv_cache_config.enable_block_reuse)
        shape = (num_layers, self.blocks_in_primary_pool, 2, tokens_per_block, num_kv_heads, head_dim)
        with torch.inference_mode(False):
            self.kv_pool = torch.zeros(shape, dtype=dtype, device=device or get_device())
        self._lock = threading.RLock()  # reset_reuse_state comes from another thread than the loop
        self.impl = KvBlockManager(
            self.blocks_in_primary_pool,
            tokens_per_block,
            self._copy_block,
            enable_reuse=self.enable_block_reuse,
            enable_partial_reuse=bool(kv_cache_config.enable_partial_reuse),
            copy_on_partial_reuse=bool(kv_cache_config.copy_on_partial_reuse),
        )

    # ---- sizes ----

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self.impl.num_free_blocks

    def get_num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self.impl.num_free_blocks

    def get_num_available_tokens(self) -> int:
        """Tokens that fit into the free blocks."""
        return self.impl.num_free_blocks * self.tokens_per_block

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Size of the cache."""
        return {
            "maxNumTokens": self.max_tokens,
            "maxNumBlocks": self.blocks_in_primary_pool,
            "tokensPerBlock": self.tokens_per_block,
        }

    def get_max_resource_count(self) -> int:
        """Number of blocks."""
        return self.blocks_in_primary_pool

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Blocks of the prompt and all of the output."""
        longest = min(request.prompt_len + request.max_new_tokens, self.max_seq_len)
        return self.impl.blocks_for(max(longest, request.prompt_len))

    def remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Blocks that a request may still take."""
        held = self.impl.sequences.get(request.py_request_id)
        needed = self.get_needed_resource_to_completion(request)
        return needed if held is None else max(needed - len(held.blocks), 0)

    def needed_blocks_one_step(self, request: LlmRequest) -> int:
        """Blocks that a request takes in the coming step."""
        held = self.impl.sequences.get(request.py_request_id)
        if held is None:
            return self.impl.blocks_for(request.prompt_len)
        if request.state != LlmRequestState.GENERATION_IN_PROGRESS:
            return 0
        return self.impl.blocks_for(held.num_tokens + 1) - len(held.blocks)

    def held_blocks(self, request: LlmRequest) -> int:
        """Blocks that would become free if this request ended."""
        held = self.impl.sequences.get(request.py_request_id)
        return sum(block.refs == 1 for block in held.blocks) if held else 0

    # ---- the life of a request ----

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Blocks for new prompts, looked up by content, and for the next token of each generation."""
        with self._lock:
            for request in scheduled_batch.context_requests:
                if request.py_request_id not in self.impl.sequences:
                    self._add_sequence(request)
                sequence = self.impl.sequences[request.py_request_id]
                sequence.computed = request.context_current_position + request.context_chunk_size
            for request in scheduled_batch.generation_requests:
                self.impl.add_token(request.py_request_id)

    def _add_sequence(self, request: LlmRequest) -> None:
        tokens = None if request.is_dummy else request.get_tokens(0)
        found = self.impl.add_sequence(request.py_request_id, request.prompt_len, tokens, _scope(request))
        request.set_prepopulated_prompt_len(found, self.tokens_per_block)
        metrics = request.perf_metrics.kv_cache_metrics
        metrics.num_reused_blocks = self.impl.sequences[request.py_request_id].reused_blocks
        metrics.num_missed_blocks = self.impl.blocks_for(request.prompt_len) - metrics.num_reused_blocks

    def update_resources(
        self,
        scheduled_batch: ScheduledRequests,
        attn_metadata: Any = None,
        kv_cache_dtype_byte_size: float | None = None,
    ) -> None:
        """Full blocks of the prompt that were computed become findable."""
        with self._lock:
            for request in scheduled_batch.context_requests:
                if not request.is_dummy and not _failed(request):
                    tokens = request.get_tokens(0)[: request.context_current_position]
                    self.impl.store(request.py_request_id, tokens, False)

    def free_resources(self, request: LlmRequest) -> None:
        """Take the blocks back; what was computed stays findable: all tokens but the last one."""
        with self._lock:
            sequence = self.impl.sequences.get(request.py_request_id)
            if sequence is not None and not request.is_dummy and not _failed(request):
                computed = min(request.get_num_tokens(0) - 1, sequence.computed)
                self.impl.store(request.py_request_id, request.get_tokens(0)[:computed], True)
            self.impl.remove_sequence(request.py_request_id)

    def reset_reuse_state(self) -> None:
        """Forget the content of all blocks: nothing computed so far is found any more. From any thread."""
        with self._lock:
            self.impl.reset_reuse_state()

    def find_new_context_block(self, request: LlmRequest) -> tuple[BlockKey, ...] | None:
        """Content that this prompt is going to add to the cache first, None if it adds no full block."""
        with self._lock:
            return self.impl.find_new_context_block(request.get_tokens(0), _scope(request))

    def shutdown(self) -> None:
        """Let go of the pool."""
        self.kv_pool = torch.empty(0)
        self.impl.sequences.clear()

    # ---- what a forward needs ----

    def get_buffers(self, layer_idx: int) -> torch.Tensor:
        """The cache of a layer, `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`."""
        return self.kv_pool[layer_idx]

    def get_cache_indices(self, request: LlmRequest) -> list[int]:
        """Block ids of a request, in the order of its tokens."""
        return self.get_batch_cache_indices([request.py_request_id])[0]

    def get_batch_cache_indices(self, request_ids: list[int]) -> list[list[int]]:
        """Block ids of each request. KeyError for a request without blocks."""
        return [[block.block_id for block in self.impl.sequences[rid].blocks] for rid in request_ids]

    def get_block_ids_per_seq(self, request_ids: list[int]) -> torch.Tensor:
        """Block ids of each request, int32 `[len(request_ids), most blocks]`, padded with 0."""
        rows = [torch.tensor(ids, dtype=torch.int32) for ids in self.get_batch_cache_indices(request_ids)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)

    def add_dummy_requests(
        self, request_ids: list[int], token_nums: list[int] | None = None, is_gen: bool = False
    ) -> list[LlmRequest]:
        """Requests of `token_nums` tokens (default 1) with own blocks, for forwards nobody waits for.

        With `is_gen` they decode the last of their tokens. OutOfBlocks if there are too few blocks.
        """
        needed = sum(map(self.impl.blocks_for, token_nums or [1] * len(request_ids)))
        if needed > self.num_free_blocks:
            raise OutOfBlocks(f"dummy requests take {needed} KV blocks, {self.num_free_blocks} are free")
        return [
            self._add_dummy(request_id, count, is_gen)
            for request_id, count in zip(request_ids, token_nums or [1] * len(request_ids), strict=True)
        ]

    def _add_dummy(self, request_id: int, num_tokens: int, is_gen: bool) -> LlmRequest:
        with self._lock:
            self.impl.add_sequence(request_id, num_tokens, None, BlockScope())
        request = LlmRequest(
            request_id=request_id,
            max_new_tokens=1,
            input_tokens=[1] * num_tokens,
            sampling_config=SamplingConfig(),
            is_dummy_request=True,
        )
        if is_gen:
            request.state = LlmRequestState.GENERATION_IN_PROGRESS
            request.prompt_len = request.py_prompt_len = num_tokens - 1
            request.context_current_position = num_tokens - 1
        return request

    def _copy_block(self, source: int, target: int, tokens: int) -> None:
        self.kv_pool[:, target, :, :tokens] = self.kv_pool[:, source, :, :tokens]


def _scope(request: LlmRequest) -> BlockScope:
    extra_keys = tuple(getattr(request, "multimodal_hashes", None) or ())
    return BlockScope(request.lora_task_id, request.cache_salt_id, extra_keys)


def _failed(request: LlmRequest) -> bool:
    """Whether the request ended by an error, so that nobody knows what its blocks hold."""
    return request.is_finished and request.finish_reason is FinishReason.NOT_FINISHED
