"""What a user asks for a request: how tokens are chosen, when to stop, what to return."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .bindings import executor as tllme


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """A grammar for the output; at most one of the fields may be set."""

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        guides = sum(bool(getattr(self, guide.name)) for guide in dataclasses.fields(self))
        if guides > 1:
            raise ValueError(f"only one guide can be used for a request, got {guides}")


class LogprobParams(NamedTuple):
    """How many log-probabilities to return, and which logits to drop once they are computed."""

    prompt_logprobs: int | None = None
    logprobs: int | None = None
    drop_context_logits: bool = False
    drop_generation_logits: bool = False


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Without temperature, top_p and top_k decoding is greedy. `n` sequences are sampled independently.
    `stop` strings need a tokenizer; `stop_token_ids` do not. `logprobs=k` returns for each generated token
    the log-probability of the token taken and of the k most likely ones.
    ValueError for values out of range, and for several sequences under greedy decoding.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    _bad_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    _stop_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)

    embedding_bias: torch.Tensor | None = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False

    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[str] | None = None

    _context_logits_auto_enabled: bool = False
    _generation_logits_auto_enabled: bool = False
    _return_log_probs: bool = False

    lookahead_config: Any = None
    guided_decoding: GuidedDecodingParams | None = None

    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    _stream_interval: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        if self.embedding_bias is not None:
            self.embedding_bias = torch.as_tensor(self.embedding_bias, dtype=torch.float32).detach().clone()
        self._validate()

    def _validate(self) -> None:
        """Raise ValueError for values that no engine can serve."""
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
        self._validate_counts()
        if self.guided_decoding is not None:
            self.guided_decoding._validate()
        self.logprobs = self.logprobs and int(self.logprobs)
        self.prompt_logprobs = self.prompt_logprobs and int(self.prompt_logprobs)

    def _validate_counts(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        best_of = self.best_of or self.n
        if best_of < self.n:
            raise ValueError(f"best_of ({best_of}) cannot be less than n ({self.n})")
        if best_of > 1 and self._greedy_decoding and not os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING"):
            raise ValueError(
                f"greedy decoding gives one and the same sequence, got best_of={best_of}: set "
                "best_of=1, or TLLM_ALLOW_N_GREEDY_DECODING=1 in the environment"
            )

    @staticmethod
    def params_imply_greedy_decoding(
        *, temperature: float | None, top_p: float | None, top_k: int | None
    ) -> bool:
        """Whether these values (None: not given) mean that the most likely token is always taken."""
        return (
            (temperature is None and top_p is None and top_k is None)
            or top_k == 1
            or top_p == 0.0
            or temperature == 0
        )

    @property
    def _greedy_decoding(self) -> bool:
        return not self.use_beam_search and self.params_imply_greedy_decoding(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k
        )

    @property
    def _need_return_context_logits(self) -> bool:
        return self.return_context_logits and not self._context_logits_auto_enabled

    @property
    def _need_return_generation_logits(self) -> bool:
        return self.return_generation_logits and not self._generation_logits_auto_enabled

    def _setup(
        self,
        tokenizer: Any,
        hf_model_config: Any = None,
        generation_config: Any = None,
        add_special_tokens: bool = False,
    ) -> SamplingParams:
        """Fill in what only the tokenizer knows: end and pad ids, and the ids of stop and bad strings."""
        del hf_model_config, generation_config
        if self.end_id is None:
            self.end_id = tokenizer.eos_token_id
            self.pad_id = tokenizer.pad_token_id
            if self.pad_id is None:
                self.pad_id = self.end_id
        if self.bad is not None:
            self._bad_word_ids = [_encode(tokenizer, text, add_special_tokens) for text in _as_list(self.bad)]
        if self.stop is not None:
            self._stop_word_ids = [
                _encode(tokenizer, text, add_special_tokens) for text in _as_list(self.stop)
            ]
        return self

    def _get_bad_words(self) -> list[list[int]]:
        return self._words("bad", self.bad, self.bad_token_ids, self._bad_word_ids)

    def _get_stop_words(self) -> list[list[int]]:
        return self._words("stop", self.stop, self.stop_token_ids, self._stop_word_ids)

    def _words(
        self,
        name: str,
        strings: str | list[str] | None,
        ids: list[int] | None,
        encoded: list[list[int]] | None,
    ) -> list[list[int]]:
        words = [[token] for token in ids or []]
        if strings is None:
            return words
        if encoded is None:
            raise RuntimeError(
                f"SamplingParams.{name} ({strings}) is not encoded yet: that takes a tokenizer"
            )
        return words + encoded

    def _get_stop_reasons_and_words(self) -> list[tuple[str | int, list[int]]]:
        """Pairs of what the user gave (token id or string) and its token ids."""
        reasons: list[str | int] = list(self.stop_token_ids or [])
        if self.stop is not None:
            reasons.extend(_as_list(self.stop))
        return list(zip(reasons, self._get_stop_words(), strict=True))

    def _get_sampling_config(self) -> tllme.SamplingConfig:
        """The executor's sampling config; `n` becomes num_return_sequences, beams become beam_width."""
        shared = {f.name for f in dataclasses.fields(tllme.SamplingConfig)} - {
            "num_return_sequences",
            "beam_width",
        }
        values = {name: getattr(self, name) for name in shared}
        if self.use_beam_search:
            values.update(num_return_sequences=self.n, beam_width=self.best_of)
        else:
            values.update(num_return_sequences=self.best_of, beam_width=1)
        return tllme.SamplingConfig(**values)

    def _get_output_config(self, is_pytorch_backend: bool = False) -> tllme.OutputConfig:
        """The executor's output config: the fields that both classes have, and whether to return logprobs."""
        shared = {f.name for f in dataclasses.fields(tllme.OutputConfig)} & set(dir(SamplingParams))
        values = {name: getattr(self, name) for name in shared}
        values["return_log_probs"] = bool(self.logprobs) if is_pytorch_backend else self._return_log_probs
        if is_pytorch_backend and self.prompt_logprobs:
            values["return_context_logits"] = True
        if self.additional_model_outputs is not None:
            values["additional_model_outputs"] = [
                tllme.AdditionalModelOutput(name) for name in self.additional_model_outputs
            ]
        return tllme.OutputConfig(**values)


def _as_list(strings: str | list[str]) -> list[str]:
    return [strings] if isinstance(strings, str) else list(strings)


def _encode(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
