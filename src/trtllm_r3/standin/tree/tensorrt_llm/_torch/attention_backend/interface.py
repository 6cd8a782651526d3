"""Metadata of one step for attention, and the base of attention backends."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from ...mapping import Mapping
from ..metadata import KVCacheParams
from .step_tensors import StepTensors

__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionRuntimeFeatures", "KVCacheParams"]


@dataclass
class AttentionRuntimeFeatures:
    """Engine features that an attention kernel may have to know of."""

    chunked_prefill: bool = False
    cache_reuse: bool = False
    has_speculative_draft_tokens: bool = False
    chunk_size: int = 0


@dataclass(kw_only=True)
class AttentionMetadata:
    """What attention must know about the batch of one step.

    The engine sets `request_ids`, `seq_lens` (int32, CPU, `[num_seqs]`: new tokens of each sequence),
    `num_contexts`, `prompt_lens` and `kv_cache_params`, contexts before generations, then calls
    `prepare()`, which fills `tensors`. With `is_cuda_graph` these keep their addresses from step to step.
    """

    max_num_requests: int
    max_num_tokens: int
    kv_cache_manager: Any
    max_num_sequences: int | None = None
    mapping: Mapping | None = None
    is_cuda_graph: bool = field(default=False, repr=False)
    seq_lens: torch.Tensor | None = None
    num_contexts: int = 0
    position_ids: torch.Tensor | None = None
    kv_cache_params: KVCacheParams | None = None
    request_ids: list[int] | None = None
    prompt_lens: list[int] | None = None
    runtime_features: AttentionRuntimeFeatures = field(default_factory=AttentionRuntimeFeatures)
    all_rank_num_tokens: list[int] | None = None
    tensors: StepTensors | None = field(default=None, repr=False)

    @property
    def num_seqs(self) -> int:
        """Number of sequences in the batch."""
        return self._lengths().shape[0]

    @property
    def num_generations(self) -> int:
        """Number of sequences that decode."""
        return self.num_seqs - self.num_contexts

    @property
    def num_ctx_tokens(self) -> int:
        """New tokens of the sequences that prefill."""
        return int(self._lengths()[: self.num_contexts].sum())

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return int(self._lengths().sum())

    @property
    def context_lens(self) -> torch.Tensor:
        """New tokens of each sequence that prefills, int32 on CPU."""
        return self._lengths()[: self.num_contexts]

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        """`seq_lens` on the device of the model, int64. RuntimeError before `prepare()`."""
        return self.step_tensors.seq_lens

    @property
    def step_tensors(self) -> StepTensors:
        """Tensors of the prepared step. RuntimeError before `prepare()`."""
        if self.tensors is None:
            raise RuntimeError("AttentionMetadata.prepare() must run before the forward")
        return self.tensors

    def prepare(self) -> None:
        """Fill `tensors` from the fields. ValueError if the fields do not fit together."""
        self._check()
        assert self.kv_cache_params is not None
        assert self.request_ids is not None
        cached = self.kv_cache_params.num_cached_tokens_per_seq
        blocks = self.kv_cache_manager.get_batch_cache_indices(self.request_ids)
        if self.tensors is None or not self.is_cuda_graph:
            self.tensors = StepTensors.eager(int(self.kv_cache_manager.tokens_per_block))
        self.tensors.fill(self._lengths(), cached, blocks, self.num_contexts)

    def create_cuda_graph_metadata(
        self, max_batch_size: int, sub_cross_metadata: bool = False, max_draft_tokens: int = 0
    ) -> AttentionMetadata:
        """A separate metadata object for a graph of `max_batch_size` decoding sequences, with static buffers.

        ValueError for cross attention or draft tokens, which are not supported.
        """
        if sub_cross_metadata or max_draft_tokens:
            raise ValueError(
                "create_cuda_graph_metadata: cross attention and max_draft_tokens are not supported"
            )
        if self.is_cuda_graph:
            return self
        graph = copy.copy(self)
        graph.is_cuda_graph = True
        graph.num_contexts = 0
        graph.seq_lens = torch.ones(max_batch_size, dtype=torch.int32)
        graph.tensors = StepTensors.static(
            int(self.kv_cache_manager.tokens_per_block),
            max_batch_size,
            _max_blocks_per_seq(self.kv_cache_manager),
        )
        return graph

    def _lengths(self) -> torch.Tensor:
        if self.seq_lens is None:
            raise ValueError("AttentionMetadata.seq_lens is not set")
        return self.seq_lens

    def _check(self) -> None:
        if (
            self.kv_cache_manager is None
            or self.kv_cache_params is None
            or not self.kv_cache_params.use_cache
        ):
            raise ValueError(
                "attention without a KV cache is not supported: set kv_cache_manager and"
                " kv_cache_params with use_cache=True"
            )
        sizes = {
            "seq_lens": self.num_seqs,
            "request_ids": len(self.request_ids or []),
            "num_cached_tokens_per_seq": len(self.kv_cache_params.num_cached_tokens_per_seq),
        }
        if len(set(sizes.values())) != 1:
            raise ValueError(f"AttentionMetadata fields differ in the number of sequences: {sizes}")
        if self.num_tokens != self.num_ctx_tokens + self.num_generations:
            raise ValueError("a generation sequence must have exactly one new token (no draft tokens)")


class AttentionBackend(ABC):
    """Attention of one layer: writes the new keys and values to the cache and attends to all visible ones."""

    Metadata: type[AttentionMetadata] = AttentionMetadata

    def __init__(
        self, layer_idx: int, num_heads: int, head_dim: int, num_kv_heads: int | None = None, **kwargs: Any
    ) -> None:
        self.layer_idx = layer_idx
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads or num_heads

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, **kwargs: Any
    ) -> torch.Tensor:
        """Rows of `q` `[num_tokens, num_heads, head_dim]` attended, same shape as `q`."""


def _max_blocks_per_seq(manager: Any) -> int:
    blocks = getattr(manager, "max_blocks_per_seq", None)
    if blocks is None:
        blocks = -(-int(manager.max_seq_len) // int(manager.tokens_per_block))
    return int(blocks)
