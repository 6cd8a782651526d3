"""One generated sequence and its log-probabilities. Imported from `result`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..disaggregated_params import DisaggregatedParams


@dataclass(slots=True)
class Logprob:
    """Log-probability of a token, and its place (1: most likely) in the vocabulary."""

    logprob: float
    rank: int | None = None


TokenLogprobs = list[dict[int, Logprob]]


class LogProbsResult(NamedTuple):
    """Log-probabilities computed after the run."""

    prompt: TokenLogprobs | None = None
    generation: TokenLogprobs | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    `finish_reason` is "stop", "length", "timeout", "cancelled", or None while it is generated; `stop_reason`
    the stop string or token id that ended it. The `*_diff` properties hold what the last response added.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Any = field(default_factory=list)
    prompt_logprobs: Any = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: torch.Tensor | None = None
    additional_context_outputs: dict[str, torch.Tensor] | None = None
    additional_generation_outputs: dict[str, torch.Tensor] | None = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: Any = None

    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)
    _incremental_states: dict[str, Any] | None = field(default=None, init=False, repr=False)
    _postprocess_result: Any = None

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        """Text that the last response added."""
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        """Tokens that the last response added."""
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> Any:
        """Log-probabilities that the last response added."""
        return self.logprobs[self._last_logprobs_len :]


def add_logprobs(output: CompletionOutput, tensors: Any, extra: LogProbsResult | None) -> None:
    """Take cumulative, prompt and token log-probabilities; the latter arrive as a list that grows."""
    cumulative = getattr(tensors, "cum_log_probs", None)
    if cumulative is not None:
        output.cumulative_logprob = cumulative[0]
    if extra is not None and extra.prompt is not None:
        output.prompt_logprobs = extra.prompt
    token_logprobs = getattr(tensors, "log_probs", None)
    if token_logprobs is not None:
        output._last_logprobs_len = len(output.logprobs)
        output.logprobs += token_logprobs[0][output._last_logprobs_len : output.length]
