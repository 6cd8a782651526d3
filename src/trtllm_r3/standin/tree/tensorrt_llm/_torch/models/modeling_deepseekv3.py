"""DeepSeek-V3."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..attention_backend import AttentionMetadata
from ..model_config import ModelConfig
from ..modules.attention import MLA
from ..modules.decoder_layer import PreNormDecoderLayer
from ..modules.fused_moe import DeepSeekV3MoeRoutingMethod, create_moe
from ..modules.gated_mlp import GatedMLP
from ..modules.linear import empty_parameter
from ..modules.rms_norm import RMSNorm
from ..utils import AuxStreamType
from .modeling_utils import DecoderModel, DecoderModelForCausalLM, register_auto_model, require


class DeepseekV3Gate(nn.Module):
    """The router: a matrix and the bias of the choice, both float32, and the routing method of its layer."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        n_group: int,
        topk_group: int,
        routed_scaling_factor: float,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(num_experts, hidden_size, dtype=torch.float32)
        self.e_score_correction_bias = empty_parameter(num_experts, dtype=torch.float32)
        self.routing_method = DeepSeekV3MoeRoutingMethod(
            top_k=top_k,
            n_group=n_group,
            topk_group=topk_group,
            routed_scaling_factor=routed_scaling_factor,
            callable_e_score_correction_bias=lambda: self.e_score_correction_bias,
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Router logits float32 `[rows, num_experts]`."""
        return F.linear(hidden_states.float(), self.weight)


class Deepseekv3MoE(nn.Module):
    """Router, experts and the shared experts that see every row."""

    def __init__(
        self, model_config: ModelConfig, aux_stream_dict: dict[AuxStreamType, Any] | None, layer_idx: int
    ) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.gate = DeepseekV3Gate(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.n_group or 1,
            config.topk_group or 1,
            config.routed_scaling_factor,
        )
        self.experts = create_moe(
            num_experts=config.n_routed_experts,
            routing_method=self.gate.routing_method,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            aux_stream_dict=aux_stream_dict,
            dtype=dtype,
            reduce_results=False,
            model_config=model_config,
            layer_idx=layer_idx,
        )
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = GatedMLP(
                hidden_size=config.hidden_size,
                dtype=dtype,
                intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
            )

    def forward(self, hidden_states: torch.Tensor, attn_metadata: AttentionMetadata) -> torch.Tensor:
        """`[rows, hidden_size]`, same shape."""
        router_logits = self.gate(hidden_states)
        routed: torch.Tensor = self.experts(
            hidden_states,
            router_logits,
            all_rank_num_tokens=attn_metadata.all_rank_num_tokens,
            use_dp_padding=False,
        )
        if self.shared_experts is None:
            return routed
        shared: torch.Tensor = self.shared_experts(hidden_states)
        return routed + shared


class DeepseekV3MLP(GatedMLP):
    """The dense feed-forward block of the first layers."""

    def forward(self, x: torch.Tensor, attn_metadata: AttentionMetadata | None = None) -> torch.Tensor:
        """`[rows, hidden_size]`, same shape."""
        return super().forward(x)


class DeepseekV3DecoderLayer(PreNormDecoderLayer):
    """Latent attention, then a dense block or experts."""

    def __init__(
        self, model_config: ModelConfig, layer_idx: int, aux_stream_dict: dict[AuxStreamType, Any] | None
    ) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.layer_idx = layer_idx
        self.self_attn = MLA(model_config, layer_idx)
        self.mlp: nn.Module
        if layer_idx >= config.first_k_dense_replace:
            self.mlp = Deepseekv3MoE(model_config, aux_stream_dict, layer_idx)
        else:
            self.mlp = DeepseekV3MLP(
                hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, dtype=dtype
            )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    @property
    def feed_forward(self) -> nn.Module:
        """The dense block or the experts."""
        return self.mlp


class DeepseekV3Model(DecoderModel):
    """The decoder; the first `first_k_dense_replace` layers are dense."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__(model_config, model_config.pretrained_config.qk_rope_head_dim)

    def make_layer(self, layer_idx: int) -> nn.Module:
        """The decoder layer of this index."""
        return DeepseekV3DecoderLayer(self.model_config, layer_idx, self.aux_stream_dict)


@register_auto_model("DeepseekV3ForCausalLM")
class DeepseekV3ForCausalLM(DecoderModelForCausalLM):
    """DeepSeek-V3 without its multi-token prediction layers. ValueError for other ways of routing."""

    def __init__(self, model_config: ModelConfig) -> None:
        require(
            model_config.pretrained_config,
            hidden_act=("silu",),
            norm_topk_prob=(True,),
            moe_layer_freq=(1,),
            topk_method=("noaux_tc",),
            scoring_func=("sigmoid",),
        )
        super().__init__(DeepseekV3Model(model_config), model_config)
