"""Turns logits into tokens, and tokens into progress of their requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...executor.result import Logprob
from ..device import get_device
from .llm_request import FinishReason, LlmRequest, LlmRequestState
from .sampling_utils import TopLogProbs, resolve_strategy, sample_rows, top_log_probs, uniform
from .streams import recorded_event, to_device

if TYPE_CHECKING:
    from .scheduler import ScheduledRequests

__all__ = ["SampleState", "SampleStateTensors", "SampleStateTorch", "Sampler", "TorchSampler"]


@dataclass
class SampleStateTensors:
    """Tokens of a step, int32 `[1, max_num_sequences, 1]` by slot, and log-probabilities if asked for."""

    new_tokens: torch.Tensor
    log_probs: TopLogProbs | None = None
    log_prob_slots: tuple[int, ...] = ()


@dataclass
class SampleState:
    """A sampled step: on the device at once, on the host after `sampler_event`."""

    scheduled_requests: ScheduledRequests
    device: SampleStateTensors | None = None
    host: SampleStateTensors | None = None
    sampler_event: Any = None


SampleStateTorch = SampleState


class Sampler(ABC):
    """Samples steps."""

    @abstractmethod
    def sample_async(
        self,
        scheduled_requests: ScheduledRequests,
        model_outputs: dict[str, torch.Tensor],
        num_context_logits_prefix_sum: list[int],
        resource_manager: Any = None,
    ) -> SampleState:
        """Launch the sampling of a step."""

    @abstractmethod
    def update_requests(self, state: SampleState, resource_manager: Any = None) -> None:
        """Wait for a step's tokens and give them to their requests."""

    def get_cache_indirection(self) -> torch.Tensor | None:
        """Where beams read their past: there are none."""
        return None

    @abstractmethod
    def validate_request(self, request: LlmRequest) -> None:
        """ValueError for a request that can't be sampled."""


class TorchSampler(Sampler):
    """Greedy, temperature, top-k and top-p, with end id, stop words, length and minimum length.

    A row's random number depends on the request's seed and the token's position, so that batching changes
    nothing. A request without a seed takes its request id.
    """

    @dataclass(frozen=True, kw_only=True)
    class Args:
        """Sizes of the sampler."""

        max_seq_len: int
        max_num_sequences: int
        max_draft_len: int = 0
        max_beam_width: int = 1
        max_total_draft_tokens: int = 0

    @dataclass(frozen=True)
    class Store:
        """Device buffers, by sequence slot."""

        new_tokens: torch.Tensor

    def __init__(self, args: TorchSampler.Args) -> None:
        if args.max_draft_len or args.max_beam_width != 1:
            raise ValueError(
                "TorchSampler: max_draft_len and max_beam_width other than 0 and 1 are not supported"
            )
        self.max_seq_len = args.max_seq_len
        self.max_num_sequences = args.max_num_sequences
        with torch.inference_mode(False):
            tokens = torch.zeros(1, args.max_num_sequences, 1, dtype=torch.int32, device=get_device())
        self.store = self.Store(tokens)

    def validate_request(self, request: LlmRequest) -> None:
        """ValueError for more than one beam."""
        if request.sampling_config.beam_width != 1:
            raise ValueError(f"beam_width={request.sampling_config.beam_width} is not supported, only 1")

    @torch.inference_mode()
    def sample_async(
        self,
        scheduled_requests: ScheduledRequests,
        model_outputs: dict[str, torch.Tensor],
        num_context_logits_prefix_sum: list[int],
        resource_manager: Any = None,
    ) -> SampleState:
        """Tokens for all rows of a step, also those of unfinished prompts, which nobody takes."""
        requests = scheduled_requests.all_requests()
        raw = _last_rows(model_outputs["logits"], num_context_logits_prefix_sum, len(requests))
        strategies = [resolve_strategy(request.sampling_config) for request in requests]
        tokens = sample_rows(_apply_min_length(raw, requests), strategies, [_draw_of(r) for r in requests])
        slots = [_slot(request) for request in requests]
        self.store.new_tokens[0, to_device(torch.tensor(slots)), 0] = tokens.int()
        asking = [row for row, request in enumerate(requests) if request.py_return_log_probs]
        log_probs = self._log_probs(raw, tokens, requests, asking)
        host = SampleStateTensors(
            self.store.new_tokens.to("cpu", non_blocking=True, copy=True),
            log_probs.to_host() if log_probs else None,
            tuple(slots[row] for row in asking),
        )
        device = SampleStateTensors(self.store.new_tokens)
        return SampleState(scheduled_requests, device, host, recorded_event())

    def update_requests(self, state: SampleState, resource_manager: Any = None) -> None:
        """Append each row's token to its request and end it where a criterion is met."""
        if state.sampler_event is not None:
            state.sampler_event.synchronize()
        assert state.host is not None
        tokens = state.host.new_tokens.flatten().tolist()
        log_probs = _log_probs_by_slot(state.host)
        for request in state.scheduled_requests.all_requests():
            if request.state == LlmRequestState.GENERATION_COMPLETE or request.context_remaining_length != 0:
                continue  # ended or paused meanwhile, or its prompt goes on
            slot = _slot(request)
            token = tokens[slot]
            if request.py_return_log_probs:
                _add_log_prob(request, token, *log_probs[slot])
            request.add_new_token(token, 0)
            request.py_decoding_iter += 1
            self._handle_stop_criteria(request, token)

    def _handle_stop_criteria(self, request: LlmRequest, new_token: int) -> bool:
        """End the request if it is at its end; whether it is."""
        if new_token == request.py_end_id:
            reason = FinishReason.END_ID
        elif self._meet_max_token_stop_criteria(request):
            reason = FinishReason.LENGTH
        elif any(request.ends_with(word) for word in request.py_stop_words_list or []):
            reason = FinishReason.STOP_WORDS
        else:
            return False
        request.finish_by_reason(reason)
        return True

    def _meet_max_token_stop_criteria(self, request: LlmRequest) -> bool:
        generated = request.get_num_tokens(0) - request.py_orig_prompt_len
        return generated >= request.py_max_new_tokens or request.get_num_tokens(0) >= self.max_seq_len

    def _log_probs(
        self, logits: torch.Tensor, tokens: torch.Tensor, requests: list[LlmRequest], rows: list[int]
    ) -> TopLogProbs | None:
        if not rows:
            return None
        index = to_device(torch.tensor(rows))
        count = max(int(requests[row].py_num_logprobs or 0) for row in rows)
        return top_log_probs(logits[index], tokens[index], min(count, logits.shape[-1]))


def _slot(request: LlmRequest) -> int:
    assert request.py_seq_slot is not None, f"request {request.py_request_id} has no slot"
    return request.py_seq_slot


def _draw_of(request: LlmRequest) -> float:
    seed = request.sampling_config.seed
    return uniform(request.py_request_id if seed is None else seed, request.get_num_tokens(0))


def _last_rows(logits: torch.Tensor, prefix_sum: list[int], count: int) -> torch.Tensor:
    """Of each prompt the last row, then one row for each generation."""
    contexts = len(prefix_sum) - 1
    if prefix_sum[-1] == contexts:
        return logits[:count]
    rows = [end - 1 for end in prefix_sum[1:]] + [prefix_sum[-1] + i for i in range(count - contexts)]
    return logits[to_device(torch.tensor(rows))]


def _apply_min_length(logits: torch.Tensor, requests: list[LlmRequest]) -> torch.Tensor:
    """Make the end id impossible for rows that have not generated their minimum."""
    held = [
        (row, request.py_end_id)
        for row, request in enumerate(requests)
        if request.py_end_id is not None
        and request.py_end_id >= 0
        and request.get_num_tokens(0) - request.py_orig_prompt_len < request.py_min_tokens
    ]
    if not held:
        return logits
    rows, ends = to_device(torch.tensor(held)).unbind(1)
    logits = logits.clone()
    logits[rows, ends] = -torch.inf
    return logits


def _log_probs_by_slot(host: SampleStateTensors) -> dict[int, tuple[Any, ...]]:
    if host.log_probs is None:
        return {}
    columns = (tensor.tolist() for tensor in host.log_probs)
    return dict(zip(host.log_prob_slots, zip(*columns, strict=True), strict=True))


def _add_log_prob(
    request: LlmRequest, token: int, chosen: float, rank: int, values: list[float], ids: list[int]
) -> None:
    """The `py_num_logprobs` best tokens, and the chosen one."""
    count = int(request.py_num_logprobs or 0)
    entry = {token: Logprob(chosen, rank)}
    for place, (value, other) in enumerate(zip(values[:count], ids[:count], strict=True), 1):
        entry.setdefault(other, Logprob(value, place))
    total = (request.py_result.cum_log_probs or [0.0])[0] + chosen
    request.py_result.append_log_probs([[entry]], [total])
