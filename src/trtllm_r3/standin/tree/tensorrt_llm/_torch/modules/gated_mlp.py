"""The gated feed-forward block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .linear import Linear


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up stacked in `gate_up_proj`."""

    def __init__(
        self, *, hidden_size: int, intermediate_size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.gate_up_proj = Linear(
            hidden_size, 2 * intermediate_size, dtype=dtype, parts=[intermediate_size] * 2
        )
        self.down_proj = Linear(intermediate_size, hidden_size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden_size]`, same shape and dtype."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        out: torch.Tensor = self.down_proj(F.silu(gate) * up)
        return out
