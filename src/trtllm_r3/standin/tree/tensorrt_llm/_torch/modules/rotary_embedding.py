"""Rotary position embedding: frequencies of the checkpoint's rope type, and the rotation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

Rope = tuple[torch.Tensor, torch.Tensor]


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, float32, for `dim` rotated values of a head."""

    inv_freq: torch.Tensor

    def __init__(self, dim: int, parameters: dict[str, Any], max_position_embeddings: int) -> None:
        super().__init__()
        inv_freq, self.attention_scaling = rope_frequencies(dim, parameters, max_position_embeddings)
        self.register_buffer("inv_freq", inv_freq.to(torch.get_default_device()), persistent=False)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> Rope:
        """Positions `[num_tokens]` to (cos, sin), each `[num_tokens, 1, dim / 2]` in `dtype`."""
        angles = position_ids.view(-1, 1, 1).float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cos.to(dtype), sin.to(dtype)


def rotate(x: torch.Tensor, rope: Rope, interleave: bool = False) -> torch.Tensor:
    """Rotate `x` `[num_tokens, heads, dim]`; pairs are (i, i + dim / 2), with `interleave` (2i, 2i + 1).

    Interleaved pairs come out apart, first halves before second halves.
    """
    cos, sin = rope
    first, second = (x[..., 0::2], x[..., 1::2]) if interleave else x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rope_frequencies(
    dim: int, parameters: dict[str, Any], max_position_embeddings: int
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 `[dim / 2]` and the factor on cosine and sine.

    `parameters` has `rope_type`, `rope_theta` and what the type needs. ValueError for an unknown type.
    """
    kind = parameters["rope_type"]
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not supported, only {', '.join(ROPE_TYPES)}")
    powers = parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    plain = 1.0 / powers
    if kind == "linear":
        return plain / parameters["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, parameters), 1.0
    if kind == "yarn":
        return _yarn(dim, powers, parameters, max_position_embeddings)
    return plain, 1.0


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """Growth of the attention temperature with the context's stretch."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _llama3(plain: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    length = parameters["original_max_position_embeddings"]
    waves = 2 * math.pi / plain
    scaled = torch.where(waves > length / low, plain / factor, plain)
    smooth = (length / waves - low) / (high - low)
    mixed = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where((waves < length / high) | (waves > length / low), scaled, mixed)


def _yarn(
    dim: int, powers: torch.Tensor, parameters: dict[str, Any], max_positions: int
) -> tuple[torch.Tensor, float]:
    length = parameters.get("original_max_position_embeddings") or max_positions
    factor = parameters.get("factor") or max_positions / length
    low, high = _yarn_range(dim, parameters, length)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, _yarn_attention(parameters, factor)


def _yarn_range(dim: int, parameters: dict[str, Any], length: int) -> tuple[float, float]:
    def turn(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))

    low = turn(parameters.get("beta_fast") or 32)
    high = turn(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention(parameters: dict[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, everywhere = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and everywhere:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, everywhere)
    return yarn_mscale(factor)
