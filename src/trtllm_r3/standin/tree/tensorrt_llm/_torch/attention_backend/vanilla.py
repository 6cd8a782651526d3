"""The attention backend of the stand-in: plain scaled dot products over the paged cache."""

from __future__ import annotations

from typing import Any

import torch

from . import ops as _ops  # noqa: F401  (registers standin::paged_attention)
from .interface import AttentionBackend, AttentionMetadata
from .step_tensors import KvView


class VanillaAttention(AttentionBackend):
    """Causal attention of one layer; scores are scaled by `sm_scale`, or 1 / sqrt(head_dim) / `q_scaling`."""

    Metadata = AttentionMetadata

    def __init__(
        self,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        q_scaling: float = 1.0,
        sm_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer_idx, num_heads, head_dim, num_kv_heads, **kwargs)
        self.sm_scale = head_dim**-0.5 / q_scaling if sm_scale is None else sm_scale

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        kv: KvView | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`q` `[T, num_heads, D]`, `k`, `v` `[T, num_kv_heads, D]` in the cache's dtype; result as `q`.

        `kv` is what `metadata.step_tensors.kv_view()` gave in this forward, the same for all layers.
        """
        view = kv or metadata.step_tensors.kv_view()
        cache = metadata.kv_cache_manager.get_buffers(self.layer_idx)
        out: torch.Tensor = torch.ops.standin.paged_attention(q, k, v, cache, *view, self.sm_scale)
        return out
