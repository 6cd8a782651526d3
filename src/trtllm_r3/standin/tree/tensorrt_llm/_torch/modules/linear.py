"""Dense layers whose weights are filled in place, so that their addresses outlive a weight update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without gradient, to be filled by `load_weights`."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """`x @ weight.T + bias`; `weight` is `[out_features, in_features]`.

    Several checkpoint matrices may be stacked in one: `parts` gives their row counts in order.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        parts: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parts = list(parts or [out_features])
        self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of `weight` `[num_embeddings, embedding_dim]` by token id."""

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = empty_parameter(num_embeddings, embedding_dim, dtype=dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`[num_tokens]` ids to `[num_tokens, embedding_dim]`."""
        return F.embedding(input_ids, self.weight)
