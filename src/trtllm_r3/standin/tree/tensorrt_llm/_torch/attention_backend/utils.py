"""Choice of the attention backend."""

from __future__ import annotations

from typing import Any

from .interface import AttentionBackend
from .vanilla import VanillaAttention

_SUPPORTED = ("TRTLLM", "VANILLA")


def get_attention_backend(backend_name: str, *args: Any, **kwargs: Any) -> type[AttentionBackend]:
    """The class for `attn_backend`; both supported names give the same kernels. ValueError for others."""
    if backend_name.upper() not in _SUPPORTED:
        raise ValueError(f"attn_backend {backend_name!r} is not supported, only {', '.join(_SUPPORTED)}")
    return VanillaAttention


def create_attention(
    backend_name: str,
    layer_idx: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    **kwargs: Any,
) -> AttentionBackend:
    """Attention of one layer on the named backend."""
    return get_attention_backend(backend_name)(layer_idx, num_heads, head_dim, num_kv_heads, **kwargs)
