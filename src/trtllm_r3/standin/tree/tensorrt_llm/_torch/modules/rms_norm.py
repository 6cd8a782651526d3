"""Root-mean-square norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, computed in float32.

    The scaled value is rounded to the dtype of `x` before it meets the weight.
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden_size]`, same shape and dtype."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
        scaled = F.rms_norm(x.float(), self.weight.shape, None, self.variance_epsilon)
        return self.weight * scaled.to(x.dtype)
