"""Grouped-query attention and multi-head latent attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..attention_backend import AttentionMetadata, create_attention
from ..model_config import ModelConfig
from .linear import Linear
from .rms_norm import RMSNorm
from .rotary_embedding import Rope, rotate, yarn_mscale


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding; with `qk_norm` queries and keys are normed per head."""

    def __init__(
        self, model_config: ModelConfig, layer_idx: int, *, bias: bool = False, qk_norm: bool = False
    ) -> None:
        super().__init__()
        config = model_config.pretrained_config
        self.layer_idx = layer_idx
        self.head_dim: int = config.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.rows = [self.num_heads * self.head_dim] + [self.num_kv_heads * self.head_dim] * 2
        dtype = model_config.torch_dtype
        self.qkv_proj = Linear(config.hidden_size, sum(self.rows), bias=bias, dtype=dtype, parts=self.rows)
        self.o_proj = Linear(self.rows[0], config.hidden_size, bias=bias, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype) if qk_norm else None
        self.attn = create_attention(
            model_config.attn_backend, layer_idx, self.num_heads, self.head_dim, self.num_kv_heads
        )

    def forward(
        self,
        position_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        attn_metadata: AttentionMetadata,
        *,
        rope: Rope,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[num_tokens, hidden_size]`, same shape; `rope` holds cosines and sines of the rows' positions."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in self.qkv_proj(hidden_states).split(self.rows, -1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(torch.cat((q, k), 1), rope).split([self.num_heads, self.num_kv_heads], 1)
        attended = self.attn.forward(q, k, v, attn_metadata, **kwargs)
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out


class MLA(nn.Module):
    """Multi-head latent attention, with keys and values expanded per head before they are cached.

    The narrower of key and value heads is padded with zeros to the width of the cache.
    """

    def __init__(self, model_config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        config = model_config.pretrained_config
        self.layer_idx = layer_idx
        self.num_heads: int = config.num_attention_heads
        self.nope: int = config.qk_nope_head_dim
        self.rope_dim: int = config.qk_rope_head_dim
        self.value: int = config.v_head_dim
        self.rank: int = config.kv_lora_rank
        self.interleave: bool = config.rope_interleave
        self._build(config, model_config.torch_dtype)
        self.width = max(self.nope + self.rope_dim, self.value)
        self.attn = create_attention(
            model_config.attn_backend,
            layer_idx,
            self.num_heads,
            self.width,
            sm_scale=_mla_scale(self.nope + self.rope_dim, config.rope_parameters),
        )

    def _build(self, config: Any, dtype: torch.dtype) -> None:
        hidden, bias = config.hidden_size, config.attention_bias
        queries = self.num_heads * (self.nope + self.rope_dim)
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, queries, dtype=dtype)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, bias=bias, dtype=dtype)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, 1e-6, dtype)
            self.q_b_proj = Linear(config.q_lora_rank, queries, dtype=dtype)
        self.is_lite = config.q_lora_rank is None
        self.kv_a_proj_with_mqa = Linear(hidden, self.rank + self.rope_dim, bias=bias, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(self.rank, 1e-6, dtype)
        self.kv_b_proj = Linear(self.rank, self.num_heads * (self.nope + self.value), dtype=dtype)
        self.o_proj = Linear(self.num_heads * self.value, hidden, bias=bias, dtype=dtype)

    def forward(
        self,
        position_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        attn_metadata: AttentionMetadata,
        *,
        rope: Rope,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[num_tokens, hidden_size]`, same shape; `rope` holds cosines and sines of the rows' positions."""
        queries = self._queries(hidden_states).unflatten(-1, (self.num_heads, -1))
        q_nope, q_rope = queries.split([self.nope, self.rope_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([self.rank, self.rope_dim], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        k_nope, v = expanded.split([self.nope, self.value], -1)
        rotated = rotate(torch.cat((q_rope, k_rope.unsqueeze(1)), 1), rope, self.interleave)
        q_rope, k_rope = rotated.split([self.num_heads, 1], 1)
        q = self._padded(torch.cat((q_nope, q_rope), -1))
        k = self._padded(torch.cat((k_nope, k_rope.expand(-1, self.num_heads, -1)), -1))
        attended = self.attn.forward(q, k, self._padded(v), attn_metadata, **kwargs)
        out: torch.Tensor = self.o_proj(attended[..., : self.value].flatten(1))
        return out

    def _queries(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (
            self.q_proj(hidden_states)
            if self.is_lite
            else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        )
        return out

    def _padded(self, heads: torch.Tensor) -> torch.Tensor:
        missing = self.width - heads.shape[-1]
        return F.pad(heads, (0, missing)) if missing else heads


def _mla_scale(query_dim: int, rope: dict[str, Any]) -> float:
    """Scale of the scores: 1 / sqrt(query_dim), times the squared temperature of a stretched context."""
    everywhere = rope.get("mscale_all_dim", 0) if rope["rope_type"] != "default" else 0
    scale: float = query_dim**-0.5
    return scale * yarn_mscale(rope["factor"], everywhere) ** 2 if everywhere else scale
