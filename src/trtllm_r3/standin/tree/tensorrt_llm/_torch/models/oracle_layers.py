"""Layers of the oracle model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..attention_backend import AttentionMetadata
from ..attention_backend.step_tensors import KvView
from ..model_config import ModelConfig
from ..modules.decoder_layer import DecoderLayer
from ..modules.fused_moe import RenormalizeMoeRoutingMethod, create_moe
from ..modules.gated_mlp import GatedMLP
from ..modules.rms_norm import RMSNorm
from ..utils import AuxStreamType
from . import oracle_ops

_LOGIT_UNIT = 2.0**-13


class OracleAttention(nn.Module):
    """Writes (token, position) to the cache and sums up what is visible there."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attn_metadata: AttentionMetadata, kv: KvView
    ) -> torch.Tensor:
        """Checksums int64 `[rows]`."""
        cache = attn_metadata.kv_cache_manager.get_buffers(self.layer_idx)
        checks: torch.Tensor = torch.ops.standin.oracle_attention(tokens, positions, cache, *kv)
        return checks


class OracleGate(nn.Module):
    """Router logits from the first column of the hidden states: token, position and version, mixed."""

    experts: torch.Tensor

    def __init__(self, layer_idx: int, num_experts: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.register_buffer("experts", torch.arange(num_experts), persistent=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[rows, num_experts]`, exact and all different within a row."""
        base = hidden_states[:, 0].to(torch.int64)
        return oracle_ops.route_scores(base, self.layer_idx, self.experts).float() * _LOGIT_UNIT


class OracleMoE(nn.Module):
    """Router and experts of one layer."""

    def __init__(
        self,
        model_config: ModelConfig,
        aux_stream_dict: dict[AuxStreamType, Any] | None,
        layer_idx: int,
    ) -> None:
        super().__init__()
        config = model_config.pretrained_config
        self.gate = OracleGate(layer_idx, config.num_experts)
        self.experts = create_moe(
            num_experts=config.num_experts,
            routing_method=RenormalizeMoeRoutingMethod(top_k=config.num_experts_per_tok),
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            aux_stream_dict=aux_stream_dict,
            dtype=torch.float32,
            model_config=model_config,
            layer_idx=layer_idx,
        )

    def forward(self, hidden_states: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Rows `normed` `[rows, hidden_size]` through the experts that `hidden_states` choose; same shape."""
        out: torch.Tensor = self.experts(normed, self.gate(hidden_states))
        return out


class OracleDecoderLayer(DecoderLayer):
    """Checksum of the cache, then a dense block or experts; the router's column passes unchanged."""

    def __init__(
        self,
        model_config: ModelConfig,
        layer_idx: int,
        aux_stream_dict: dict[AuxStreamType, Any] | None,
    ) -> None:
        super().__init__()
        config = model_config.pretrained_config
        self.layer_idx = layer_idx
        self.is_moe = layer_idx >= config.first_k_dense_replace
        self.self_attn = OracleAttention(layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, 1e-6)
        self.mlp: nn.Module = (
            OracleMoE(model_config, aux_stream_dict, layer_idx)
            if self.is_moe
            else GatedMLP(hidden_size=config.hidden_size, intermediate_size=config.moe_intermediate_size)
        )

    def forward(
        self,
        position_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        attn_metadata: AttentionMetadata,
        residual: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[rows, hidden_size]`, same shape."""
        normed = self.post_attention_layernorm(hidden_states)
        out: torch.Tensor = self.mlp(hidden_states, normed) if self.is_moe else self.mlp(normed)
        return torch.cat((hidden_states[:, :1], hidden_states[:, 1:] + out[:, 1:]), 1)
