"""Mixtral."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from ..attention_backend import AttentionMetadata
from ..model_config import ModelConfig
from ..modules.attention import Attention
from ..modules.decoder_layer import PreNormDecoderLayer
from ..modules.fused_moe import RenormalizeMoeRoutingMethod, create_moe
from ..modules.linear import Linear
from ..modules.rms_norm import RMSNorm
from ..utils import AuxStreamType
from .modeling_utils import DecoderModel, DecoderModelForCausalLM, register_auto_model, require

_EXPERT_PARENT = re.compile(r"^(model\.layers\.\d+)\.mlp\.")


class MixtralMoE(nn.Module):
    """Router and experts of one layer."""

    def __init__(
        self,
        model_config: ModelConfig,
        aux_stream_dict: dict[AuxStreamType, Any] | None,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.gate = Linear(config.hidden_size, config.num_local_experts, dtype=dtype)
        self.experts = create_moe(
            num_experts=config.num_local_experts,
            routing_method=RenormalizeMoeRoutingMethod(top_k=config.num_experts_per_tok),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            aux_stream_dict=aux_stream_dict,
            dtype=dtype,
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


class MixtralDecoderLayer(PreNormDecoderLayer):
    """Attention, then experts."""

    def __init__(
        self, model_config: ModelConfig, layer_idx: int, aux_stream_dict: dict[AuxStreamType, Any] | None
    ) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.layer_idx = layer_idx
        self.self_attn = Attention(model_config, layer_idx)
        self.block_sparse_moe = MixtralMoE(model_config, aux_stream_dict, layer_idx=layer_idx)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    @property
    def feed_forward(self) -> nn.Module:
        """The experts."""
        return self.block_sparse_moe


class MixtralModel(DecoderModel):
    """The decoder; every layer has experts."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__(model_config, model_config.pretrained_config.head_dim)

    def make_layer(self, layer_idx: int) -> nn.Module:
        """The decoder layer of this index."""
        return MixtralDecoderLayer(self.model_config, layer_idx, self.aux_stream_dict)


@register_auto_model("MixtralForCausalLM")
class MixtralForCausalLM(DecoderModelForCausalLM):
    """Mixtral. ValueError for sliding windows."""

    def __init__(self, model_config: ModelConfig) -> None:
        require(model_config.pretrained_config, hidden_act=("silu",), sliding_window=(None,))
        super().__init__(MixtralModel(model_config), model_config)

    def rename_weight(self, name: str) -> str:
        """Either name of the feed-forward block to `block_sparse_moe`."""
        return _EXPERT_PARENT.sub(r"\1.block_sparse_moe.", name)
