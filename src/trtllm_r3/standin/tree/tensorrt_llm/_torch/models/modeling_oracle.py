"""A model whose routes and tokens can be computed by hand.

The router is a function of (token, position, layer, weight version); the next token is a function of all
tokens that the paged cache of every layer shows at their positions. Everything else is as in a real model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..attention_backend import AttentionMetadata
from ..model_config import ModelConfig
from ..modules.linear import Embedding
from .modeling_utils import DecoderModelForCausalLM, create_aux_streams, register_auto_model
from .oracle_layers import OracleDecoderLayer
from .oracle_ops import ROUTER_PRIME, next_token, route_base

_EXACT = 1 << 24


class OracleMoeModel(nn.Module):
    """Embedding and layers; `weight_version` is read in every forward."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        config = model_config.pretrained_config
        self.weight_version = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        streams = create_aux_streams()
        self.layers = nn.ModuleList(
            OracleDecoderLayer(model_config, index, streams) for index in range(config.num_hidden_layers)
        )

    def forward(
        self,
        attn_metadata: AttentionMetadata,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Checksums int64 `[rows]` over all layers. ValueError without ids or with embeddings."""
        if input_ids is None or position_ids is None or inputs_embeds is not None:
            raise ValueError("the oracle model takes input_ids and position_ids, not inputs_embeds")
        tokens, positions = input_ids.to(torch.int64), position_ids.view(-1).to(torch.int64)
        base = route_base(tokens, positions, self.weight_version).unsqueeze(1)
        hidden = torch.cat((base.float(), self.embed_tokens(tokens)[:, 1:]), 1)
        kv = attn_metadata.step_tensors.kv_view()
        total = torch.zeros_like(tokens)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, OracleDecoderLayer)
            total = total + (index + 1) * layer.self_attn(tokens, positions, attn_metadata, kv)
            hidden = layer(position_ids, hidden, attn_metadata)
        return total


@register_auto_model("OracleMoeForCausalLM")
class OracleMoeForCausalLM(DecoderModelForCausalLM):
    """The oracle. Greedy decoding gives the token of the checksum; its neighbours follow in likelihood.

    ValueError for sizes that float32 or the router's numbers can't tell apart.
    """

    vocabulary: torch.Tensor

    def __init__(self, model_config: ModelConfig) -> None:
        config = model_config.pretrained_config
        limits = {"vocab_size": _EXACT, "max_position_embeddings": _EXACT, "num_experts": ROUTER_PRIME}
        for name, limit in limits.items():
            if getattr(config, name) >= limit:
                raise ValueError(
                    f"OracleMoeForCausalLM: {name}={getattr(config, name)} must be below {limit}"
                )
        if config.hidden_size < 2 or config.num_experts_per_tok > config.num_experts:
            raise ValueError(
                "OracleMoeForCausalLM: expected hidden_size >= 2 and num_experts_per_tok <= num_experts"
            )
        if model_config.torch_dtype != torch.float32:
            raise ValueError("OracleMoeForCausalLM: dtype must be float32, for its numbers are exact")
        super().__init__(OracleMoeModel(model_config), model_config)
        self.register_buffer("vocabulary", torch.arange(config.vocab_size), persistent=False)

    def make_lm_head(self) -> None:
        """No head: logits come from the checksum."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[rows, vocab]`: 0 at the next token, then -1, -2, ... upwards from it."""
        size = self.config.vocab_size
        distance: torch.Tensor = (self.vocabulary - next_token(hidden, size).unsqueeze(1)) % size
        return -distance.float()
