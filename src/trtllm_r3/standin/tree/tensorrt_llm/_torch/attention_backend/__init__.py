"""Attention over a paged KV cache."""

from .interface import AttentionBackend, AttentionMetadata, AttentionRuntimeFeatures
from .utils import create_attention, get_attention_backend
from .vanilla import VanillaAttention

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionRuntimeFeatures",
    "VanillaAttention",
    "create_attention",
    "get_attention_backend",
]
