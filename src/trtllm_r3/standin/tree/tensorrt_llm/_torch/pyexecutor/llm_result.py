"""What a request sends back. Imported from `llm_request`."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import torch

from ...bindings.executor import FinishReason
from ...executor.result import TokenLogprobs


@dataclass
class Result:
    """Part of a response that travels as bytes."""

    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    is_final: bool
    is_sequence_final: bool
    sequence_index: int
    decoding_iter: int
    avg_decoded_tokens_per_iter: float | None = None
    context_phase_params: Any = None
    request_perf_metrics: Any = None


@dataclass
class PyResult:
    """Outputs beside tokens, gathered while the sequence runs. All tensors are on CPU.

    `log_probs`: one list of `{token: Logprob}` per beam, which grows; `context_logits` `[prompt, vocab]`,
    `generation_logits` `[1, generated, vocab]`, None unless asked for.
    """

    _context_logits: list[torch.Tensor] = field(default_factory=list)
    _generation_logits: list[torch.Tensor] = field(default_factory=list)
    _log_probs: list[TokenLogprobs] | None = None
    _cum_log_probs: list[float] | None = None
    _mm_embeddings: Any = None
    _additional_context_outputs: dict[str, list[torch.Tensor]] | None = None
    _additional_generation_outputs: dict[str, list[torch.Tensor]] | None = None

    def append_context_logits(self, logits: torch.Tensor) -> None:
        """Add logits of prompt tokens, `[tokens, vocab]`."""
        self._context_logits.append(logits.to("cpu", copy=True))

    def append_generation_logits(self, logits: torch.Tensor) -> None:
        """Add the logits that the next token is chosen from, `[1, vocab]`."""
        self._generation_logits.append(logits.to("cpu", copy=True))

    def append_log_probs(
        self, log_probs: list[TokenLogprobs], cum_log_probs: list[float] | None = None
    ) -> None:
        """Add log-probabilities of new tokens, one list per beam."""
        if self._log_probs is None:
            self._log_probs, self._cum_log_probs = [[] for _ in log_probs], [0.0] * len(log_probs)
        for mine, new in zip(self._log_probs, log_probs, strict=True):
            mine.extend(new)
        self._cum_log_probs = cum_log_probs or self._cum_log_probs

    def append_additional_generation_outputs(self, name: str, output: torch.Tensor) -> None:
        """Add a tensor under a name of its own."""
        if self._additional_generation_outputs is None:
            self._additional_generation_outputs = {}
        self._additional_generation_outputs.setdefault(name, []).append(output.to("cpu", non_blocking=True))

    @property
    def context_logits(self) -> torch.Tensor | None:
        """Logits of the prompt `[prompt, vocab]`."""
        return torch.cat(self._context_logits) if self._context_logits else None

    @property
    def generation_logits(self) -> torch.Tensor | None:
        """Logits of the generated tokens `[1, generated, vocab]`."""
        return torch.cat(self._generation_logits).unsqueeze(0) if self._generation_logits else None

    @property
    def log_probs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of all generated tokens, one list per beam."""
        return self._log_probs

    @property
    def cum_log_probs(self) -> list[float] | None:
        """Their sum per beam."""
        return self._cum_log_probs

    @property
    def mm_embedding_handle(self) -> Any:
        """Handle of multimodal embeddings: none here."""
        return self._mm_embeddings

    @property
    def additional_context_outputs(self) -> dict[str, torch.Tensor] | None:
        """Named tensors of the prompt."""
        return _joined(self._additional_context_outputs)

    @property
    def additional_generation_outputs(self) -> dict[str, torch.Tensor] | None:
        """Named tensors of the generated tokens."""
        return _joined(self._additional_generation_outputs)


def _joined(parts: dict[str, list[torch.Tensor]] | None) -> dict[str, torch.Tensor] | None:
    if parts is None:
        return None
    return {name: p[0] if len(p) == 1 else torch.cat(p) for name, p in parts.items() if p}


class LlmResult:
    """Fields of `Result` (after `deserialize()`) and of `PyResult`. Further attributes travel along."""

    py_result_properties = frozenset(
        (
            "context_logits",
            "generation_logits",
            "log_probs",
            "cum_log_probs",
            "mm_embedding_handle",
            "additional_context_outputs",
            "additional_generation_outputs",
        )
    )

    def __init__(self, result: bytes | Result, py_result: PyResult, is_final: bool = False) -> None:
        self._result = result
        self._py_result = py_result
        self.is_final = is_final
        self.cached_tokens = 0

    def __getattr__(self, item: str) -> Any:
        if item in self.py_result_properties:
            return getattr(self.__dict__["_py_result"], item)
        if item.startswith("_") or "_result" not in self.__dict__:
            raise AttributeError(item)
        return getattr(self._result, item)

    def deserialize(self) -> None:
        """Turn the bytes into fields."""
        if isinstance(self._result, bytes):
            self._result = pickle.loads(self._result)

    def get_result(self) -> Any:
        """The deserialised fields."""
        self.deserialize()
        return self._result


@dataclass
class LlmResponse:
    """Answer of the engine: a result, or an error text."""

    request_id: int
    error_msg: str | None = None
    result: LlmResult | None = None
    client_id: int | None = None

    def has_error(self) -> bool:
        """Whether the request failed."""
        return self.error_msg is not None

    def clear_context_logits(self) -> None:
        """Drop the prompt's logits."""
        if self.result is not None:
            self.result._py_result._context_logits = []

    def clear_generation_logits(self) -> None:
        """Drop the generated tokens' logits."""
        if self.result is not None:
            self.result._py_result._generation_logits = []
