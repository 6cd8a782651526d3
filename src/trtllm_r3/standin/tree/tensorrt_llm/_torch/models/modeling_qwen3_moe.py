"""Qwen3-MoE."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..attention_backend import AttentionMetadata
from ..model_config import ModelConfig
from ..modules.attention import Attention
from ..modules.decoder_layer import PreNormDecoderLayer
from ..modules.fused_moe import (
    BaseMoeRoutingMethod,
    DefaultMoeRoutingMethod,
    RenormalizeMoeRoutingMethod,
    create_moe,
)
from ..modules.linear import empty_parameter
from ..modules.rms_norm import RMSNorm
from ..utils import AuxStreamType
from .modeling_utils import DecoderModel, DecoderModelForCausalLM, register_auto_model, require


class Qwen3Gate(nn.Module):
    """The router: a matrix, and the routing method made for its layer."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, dtype: torch.dtype, norm_topk_prob: bool = True
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob
        self.weight = empty_parameter(num_experts, hidden_size, dtype=dtype)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Router logits `[rows, num_experts]` in the model's dtype."""
        return F.linear(hidden_states, self.weight)

    @property
    def routing_method(self) -> BaseMoeRoutingMethod:
        """A new routing method: scales sum to one with `norm_topk_prob`, are plain probabilities without."""
        if self.norm_topk_prob:
            return RenormalizeMoeRoutingMethod(top_k=self.top_k)
        return DefaultMoeRoutingMethod(top_k=self.top_k)


class Qwen3MoE(nn.Module):
    """Router and experts of one layer."""

    def __init__(
        self,
        model_config: ModelConfig,
        aux_stream_dict: dict[AuxStreamType, Any] | None,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        config = model_config.pretrained_config
        self.gate = Qwen3Gate(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            model_config.torch_dtype,
            config.norm_topk_prob,
        )
        self.experts = create_moe(
            num_experts=config.num_experts,
            routing_method=self.gate.routing_method,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            aux_stream_dict=aux_stream_dict,
            dtype=model_config.torch_dtype,
            reduce_results=False,
            model_config=model_config,
            layer_idx=layer_idx,
        )

    def forward(self, hidden_states: torch.Tensor, attn_metadata: AttentionMetadata) -> torch.Tensor:
        """`[rows, hidden_size]`, same shape."""
        router_logits = self.gate(hidden_states)
        out: torch.Tensor = self.experts(
            hidden_states,
            router_logits,
            all_rank_num_tokens=attn_metadata.all_rank_num_tokens,
            use_dp_padding=False,
        )
        return out


class Qwen3MoEDecoderLayer(PreNormDecoderLayer):
    """Attention with normed queries and keys, then experts."""

    def __init__(
        self, model_config: ModelConfig, layer_idx: int, aux_stream_dict: dict[AuxStreamType, Any] | None
    ) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.layer_idx = layer_idx
        self.self_attn = Attention(model_config, layer_idx, bias=config.attention_bias, qk_norm=True)
        self.mlp = Qwen3MoE(model_config, aux_stream_dict, layer_idx=layer_idx)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    @property
    def feed_forward(self) -> nn.Module:
        """The experts."""
        return self.mlp


class Qwen3MoEModel(DecoderModel):
    """The decoder; every layer has experts."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__(model_config, model_config.pretrained_config.head_dim)

    def make_layer(self, layer_idx: int) -> nn.Module:
        """The decoder layer of this index."""
        return Qwen3MoEDecoderLayer(self.model_config, layer_idx, self.aux_stream_dict)


@register_auto_model("Qwen3MoeForCausalLM")
class Qwen3MoeForCausalLM(DecoderModelForCausalLM):
    """Qwen3-MoE. ValueError for dense layers among the experts and for sliding windows."""

    def __init__(self, model_config: ModelConfig) -> None:
        config = model_config.pretrained_config
        require(
            config,
            hidden_act=("silu",),
            decoder_sparse_step=(1,),
            mlp_only_layers=([], None),
            use_sliding_window=(False, None),
        )
        super().__init__(Qwen3MoEModel(model_config), model_config)
