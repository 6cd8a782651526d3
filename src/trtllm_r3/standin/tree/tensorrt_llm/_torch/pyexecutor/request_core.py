"""Tokens and progress of one sequence (stock: the bound C++ part of LlmRequest)."""

from __future__ import annotations

import enum
from typing import Any

from ...bindings.executor import FinishReason, SamplingConfig


class LlmRequestState(enum.IntEnum):
    """How far a request has got; later states have larger values."""

    UNKNOWN = 0
    ENCODER_INIT = 1
    CONTEXT_INIT = 2
    GENERATION_IN_PROGRESS = 3
    GENERATION_TO_COMPLETE = 4
    GENERATION_COMPLETE = 5


class RequestCore:
    """One sequence of beam width 1: the prompt, then what is generated.

    Positions are absolute. The prompt is computed in chunks: `context_current_position` is the first token
    not yet computed, `context_chunk_size` what the coming step takes.
    """

    def __init__(
        self,
        *,
        request_id: int,
        max_new_tokens: int,
        input_tokens: list[int],
        sampling_config: SamplingConfig,
        is_streaming: bool = False,
        end_id: int | None = None,
        pad_id: int | None = None,
        client_id: int | None = None,
        cache_salt_id: int | None = None,
        lora_task_id: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.max_new_tokens = max_new_tokens
        self.sampling_config = sampling_config
        self.streaming = is_streaming
        self.end_id, self.pad_id = end_id, pad_id
        self.client_id = client_id
        self.cache_salt_id, self.lora_task_id = cache_salt_id, lora_task_id
        self._tokens = list(input_tokens)
        self.prompt_len = self.orig_prompt_len = len(input_tokens)
        self.state = LlmRequestState.CONTEXT_INIT
        self.seq_slot: int | None = None
        self.decoding_iter = 0
        self.context_current_position = 0
        self.prepopulated_prompt_len = 0
        self._context_chunk_size = self.prompt_len
        self._finish_reason = FinishReason.NOT_FINISHED
        self._max_sent_token_len = self.prompt_len
        self.is_child = False
        self.parent_request_id: int | None = None
        self.sequence_index = 0
        self._sequence_final = [False]  # one list for a parent and its children

    # ---- tokens ----

    def get_num_tokens(self, beam: int) -> int:
        """Tokens of the sequence so far, the prompt included."""
        return len(self._tokens)

    def get_tokens(self, beam: int) -> list[int]:
        """A copy of all tokens so far."""
        return list(self._tokens)

    def get_token(self, beam: int, pos: int) -> int:
        """The token at an absolute position."""
        return self._tokens[pos]

    def get_last_tokens(self, beam: int) -> int:
        """The newest token."""
        return self._tokens[-1]

    def ends_with(self, tokens: list[int]) -> bool:
        """Whether these are the newest tokens."""
        return self._tokens[-len(tokens) :] == tokens

    def add_new_token(self, token: int, beam: int) -> int:
        """Append a generated token; the new length."""
        self._tokens.append(token)
        return len(self._tokens)

    @property
    def max_beam_num_tokens(self) -> int:
        """Tokens of the longest beam so far."""
        return len(self._tokens)

    @property
    def max_num_generated_tokens(self) -> int:
        """Tokens behind the prompt; after a pause those behind the new prompt."""
        return len(self._tokens) - self.prompt_len

    # ---- prompt ----

    @property
    def context_chunk_size(self) -> int:
        """Prompt tokens of the coming step."""
        return self._context_chunk_size

    @context_chunk_size.setter
    def context_chunk_size(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"context_chunk_size must not be negative, got {size}")
        self._context_chunk_size = min(size, self.context_remaining_length)

    @property
    def context_remaining_length(self) -> int:
        """Prompt tokens not yet computed."""
        return self.prompt_len - self.context_current_position

    @property
    def is_first_context_chunk(self) -> bool:
        """Whether nothing of the prompt was computed for this request itself."""
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def is_last_context_chunk(self) -> bool:
        """Whether the coming step completes the prompt."""
        return self.context_current_position + self._context_chunk_size == self.prompt_len

    def move_to_next_context_chunk(self) -> None:
        """The chunk was launched."""
        self.context_current_position += self._context_chunk_size
        self._context_chunk_size = 0

    def set_prepopulated_prompt_len(self, length: int, tokens_per_block: int) -> None:
        """So many prompt tokens are in the cache already; a chunk that isn't the last ends with a block."""
        self.prepopulated_prompt_len = length
        if length == 0:
            return
        chunk = self._context_chunk_size
        boundary = (length + chunk) // tokens_per_block * tokens_per_block
        if length < boundary and length + chunk < self.prompt_len:
            chunk = boundary - length
        self.context_current_position = length
        self.context_chunk_size = chunk

    # ---- state ----

    @property
    def is_context_init_state(self) -> bool:
        """Whether the prompt is not complete."""
        return self.state == LlmRequestState.CONTEXT_INIT

    @property
    def is_generation_in_progress_state(self) -> bool:
        """Whether tokens are being generated."""
        return self.state in (LlmRequestState.GENERATION_IN_PROGRESS, LlmRequestState.GENERATION_TO_COMPLETE)

    @property
    def is_generation_complete_state(self) -> bool:
        """Whether it ended, in whatever way."""
        return self.state == LlmRequestState.GENERATION_COMPLETE

    @property
    def is_finished(self) -> bool:
        """Whether it ended, in whatever way."""
        return self.is_generation_complete_state

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended; NOT_FINISHED for one that runs or failed."""
        return self._finish_reason

    def finish_by_reason(self, reason: FinishReason) -> None:
        """End the sequence."""
        self.state = LlmRequestState.GENERATION_COMPLETE
        self._finish_reason = reason

    def will_complete_next_iteration(self) -> bool:
        """Whether the token that is being computed is the last one by length."""
        return self.max_num_generated_tokens + 1 >= self.max_new_tokens

    def pause(self, max_input_len: int) -> None:
        """Become a request with all that was generated in its prompt; positions stay what they are."""
        new_prompt_len = min(max_input_len, len(self._tokens))
        del self._tokens[new_prompt_len:]
        self.max_new_tokens -= new_prompt_len - self.prompt_len
        self.prompt_len = new_prompt_len
        self.state = LlmRequestState.CONTEXT_INIT
        self.context_current_position = self.prepopulated_prompt_len = 0
        self._context_chunk_size = new_prompt_len
        self.seq_slot = None

    # ---- parent and children ----

    def _adopt(self, child: RequestCore) -> None:
        """Make `child` a further sequence of this request."""
        child.is_child, child.parent_request_id = True, self.request_id
        self._sequence_final.append(False)
        child._sequence_final = self._sequence_final
        child.sequence_index = len(self._sequence_final) - 1

    def _core_options(self) -> dict[str, Any]:
        """Arguments to build a sequence with the same prompt and options."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "input_tokens": self._tokens[: self.prompt_len],
            "is_streaming": self.streaming,
            "end_id": self.end_id,
            "pad_id": self.pad_id,
            "client_id": self.client_id,
            "cache_salt_id": self.cache_salt_id,
            "lora_task_id": self.lora_task_id,
        }
