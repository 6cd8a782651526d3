"""Keeps logits for requests that want them back."""

from __future__ import annotations

import torch

from .llm_request import LlmRequest


class HandleLogits:
    """Adds a step's logits to the results of its requests."""

    def __call__(
        self,
        context_requests: list[LlmRequest],
        generation_requests: list[LlmRequest],
        logits: torch.Tensor,
        num_context_logits_prefix_sum: list[int],
    ) -> None:
        """`logits` `[rows, vocab]`; prompt i has rows `prefix_sum[i]` up to `prefix_sum[i + 1]`."""
        bounds = num_context_logits_prefix_sum
        for request, start, end in zip(context_requests, bounds, bounds[1:], strict=False):
            if request.py_return_context_logits:
                _append_context_logits(request, logits[start:end])
            if request.py_return_generation_logits and request.is_last_context_chunk:
                request.py_result.append_generation_logits(logits[end - 1 : end])
        for row, request in enumerate(generation_requests, bounds[-1]):
            if request.py_return_generation_logits and not request.is_finished:
                request.py_result.append_generation_logits(logits[row : row + 1])


def _append_context_logits(request: LlmRequest, logits: torch.Tensor) -> None:
    """Rows of the prompt as the user gave it; what a paused request computes again is there already."""
    begin = request.context_current_position
    first = max(begin, request.context_logits_end)
    request.context_logits_end = min(begin + len(logits), request.py_orig_prompt_len)
    if first < request.context_logits_end:
        request.py_result.append_context_logits(logits[first - begin : request.context_logits_end - begin])
