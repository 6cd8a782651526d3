"""Choosing tokens from logits, row by row independent of the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...bindings.executor import SamplingConfig
from .streams import to_device

_MASK = (1 << 64) - 1


class Strategy(NamedTuple):
    """How one row is sampled; `top_k` 0 means all tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False


def resolve_strategy(config: SamplingConfig) -> Strategy:
    """The strategy of a request. Greedy: nothing given, or temperature 0, top_k 1 or top_p 0."""
    given = (config.temperature, config.top_k, config.top_p)
    if given == (None, None, None) or config.temperature == 0 or config.top_k == 1 or config.top_p == 0:
        return Strategy(greedy=True)
    temperature = 1.0 if config.temperature is None else config.temperature
    return Strategy(temperature, config.top_k or 0, 1.0 if config.top_p is None else config.top_p)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the request's seed and the token's position alone (splitmix64)."""
    state = _mix(_mix(seed & _MASK) + position + 1)
    return (state >> 11) / (1 << 53)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample_rows(logits: torch.Tensor, strategies: list[Strategy], draws: list[float]) -> torch.Tensor:
    """A token id for each row of `logits` `[rows, vocab]`, int64 `[rows]`; `draws` are uniform numbers."""
    tokens = logits.argmax(dim=-1)
    rows = [row for row, strategy in enumerate(strategies) if not strategy.greedy]
    if not rows:
        return tokens
    index = to_device(torch.tensor(rows))
    settings = to_device(
        torch.tensor(
            [[*strategies[row][:3], draws[row]] for row in rows],
            dtype=torch.float64,
        )
    )
    tokens[index] = _draw(logits[index].double(), *settings.unsqueeze(-1).unbind(1))
    return tokens


def _draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    draw: torch.Tensor,
) -> torch.Tensor:
    """Inverse transform over the tokens in order of probability, cut by top-k, then by top-p."""
    ordered, ids = (logits / temperature).sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill((top_k > 0) & (ranks >= top_k), -torch.inf)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    total = probs.masked_fill_(before >= top_p.clamp(min=1e-12), 0.0).cumsum(dim=-1)
    chosen = (total <= draw * total[:, -1:]).sum(dim=-1, keepdim=True)
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return ids.gather(-1, torch.minimum(chosen, last)).squeeze(-1)


class TopLogProbs(NamedTuple):
    """Log-probabilities of sampled rows: the chosen token's value and rank `[rows]`, the best `[rows, k]`."""

    chosen: torch.Tensor
    ranks: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def to_host(self) -> TopLogProbs:
        """The same on CPU, copied without waiting."""
        return TopLogProbs(*(tensor.to("cpu", non_blocking=True) for tensor in self))


def top_log_probs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogProbs:
    """Log-probabilities of `tokens` `[rows]` under `logits` `[rows, vocab]` as they came from the model."""
    everything = logits.float().log_softmax(dim=-1)
    chosen = everything.gather(-1, tokens.unsqueeze(-1))
    ranks = (everything > chosen).sum(dim=-1) + 1
    values, ids = everything.topk(count, dim=-1)
    return TopLogProbs(chosen.squeeze(-1), ranks, values, ids)
