"""Base of decoder layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from ..attention_backend import AttentionMetadata


class DecoderLayer(nn.Module, ABC):
    """One block of attention and feed-forward."""

    @abstractmethod
    def forward(
        self,
        position_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        attn_metadata: AttentionMetadata,
        residual: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[num_tokens, hidden_size]`, same shape."""


class PreNormDecoderLayer(DecoderLayer):
    """The usual layer: each half is normed first and added to what came in.

    Subclasses set `input_layernorm`, `self_attn`, `post_attention_layernorm` and answer `feed_forward`.
    """

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module

    @property
    @abstractmethod
    def feed_forward(self) -> nn.Module:
        """The module called as `(hidden_states, attn_metadata)`."""

    def forward(
        self,
        position_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        attn_metadata: AttentionMetadata,
        residual: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[num_tokens, hidden_size]`, same shape."""
        attended = self.self_attn(position_ids, self.input_layernorm(hidden_states), attn_metadata, **kwargs)
        hidden_states = hidden_states + attended
        out: torch.Tensor = self.feed_forward(self.post_attention_layernorm(hidden_states), attn_metadata)
        return hidden_states + out
