"""The engine's own request: one sequence, with everything the loop keeps of it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

from ...bindings.executor import FinishReason, SamplingConfig
from ...bindings.executor import Request as ExecutorRequest
from .llm_result import LlmResponse, LlmResult, PyResult, Result
from .perf_metrics import RequestPerfMetrics
from .request_core import LlmRequestState, RequestCore

__all__ = [
    "ExecutorRequest",
    "FinishReason",
    "LlmRequest",
    "LlmRequestState",
    "LlmResponse",
    "LlmResult",
    "PyResult",
    "SamplingConfig",
    "executor_request_to_llm_request",
    "get_draft_token_length",
]

_COPIED = (  # attributes of the executor's request that the engine's takes over
    ("py_num_logprobs", None),
    ("py_lora_path", None),
    ("py_logits_post_processors", None),
    ("py_multimodal_data", None),
    ("py_scheduling_params", None),
    ("py_arrival_time", None),
)
_OF_EACH = ("py_request_id", "py_result", "py_seq_slot", "py_batch_idx")  # not a child's to inherit


class LlmRequest(RequestCore):
    """One sequence. Takes further attributes; those named `py_*` are deep-copied to children.

    `py_prompt_len` and `py_orig_prompt_len` stay what they were at creation, `prompt_len` grows by a pause.
    """

    def __init__(
        self,
        *,
        request_id: int,
        max_new_tokens: int,
        input_tokens: list[int],
        sampling_config: SamplingConfig,
        return_log_probs: bool = False,
        return_context_logits: bool = False,
        return_generation_logits: bool = False,
        return_perf_metrics: bool = False,
        exclude_last_generation_logits: bool = False,
        stop_words_list: list[list[int]] | None = None,
        is_dummy_request: bool = False,
        **core: Any,
    ) -> None:
        super().__init__(
            request_id=request_id,
            max_new_tokens=max_new_tokens,
            input_tokens=input_tokens,
            sampling_config=sampling_config,
            **core,
        )
        self.py_request_id, self.py_client_id = request_id, self.client_id
        self.py_end_id = self.end_id
        self.py_prompt_len = self.py_orig_prompt_len = self.prompt_len
        self.py_max_new_tokens = max_new_tokens
        self.py_min_tokens = sampling_config.min_tokens or 0
        self.py_stop_words_list = stop_words_list
        self.py_return_log_probs = return_log_probs
        self.py_return_context_logits = return_context_logits
        self.py_return_generation_logits = return_generation_logits
        self.py_exclude_last_generation_logits = exclude_last_generation_logits
        self.return_perf_metrics = return_perf_metrics
        self.is_dummy_request = is_dummy_request
        self._init_attributes()
        self._init_progress()

    def _init_attributes(self) -> None:
        """What comes from the executor's request."""
        self.py_num_logprobs: int | None = None
        self.py_lora_path: str | None = None
        self.py_logits_post_processors: Any = None
        self.py_multimodal_data: Any = None
        self.py_scheduling_params: Any = None
        self.py_arrival_time: float | None = None

    def _init_progress(self) -> None:
        """What the loop keeps."""
        self.py_seq_slot: int | None = None
        self.py_batch_idx: int | None = None
        self.py_draft_tokens: list[int] = []
        self.py_num_accepted_draft_tokens = 0
        self.py_rewind_len = 0
        self.py_last_context_chunk: tuple[int | None, int | None] = (None, None)
        self.py_decoding_iter = 0
        self.py_result = PyResult()
        self.perf_metrics = RequestPerfMetrics()
        self.is_attention_dp_dummy = False
        self.is_cuda_graph_dummy = False
        self.child_requests: list[LlmRequest] = []
        self.context_logits_end = 0
        self._cached_tokens: int | None = None

    @property
    def is_dummy(self) -> bool:
        """Whether nobody waits for its tokens."""
        return self.is_attention_dp_dummy or self.is_cuda_graph_dummy or self.is_dummy_request

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache when it first ran."""
        return self._cached_tokens or 0

    @cached_tokens.setter
    def cached_tokens(self, value: int) -> None:
        if self._cached_tokens is None:
            self._cached_tokens = value

    def pause(self, max_input_len: int) -> None:
        """Give up what the engine holds for it; it starts again with a longer prompt."""
        super().pause(max_input_len)
        del self.py_result._generation_logits[self.get_num_tokens(0) - self.py_orig_prompt_len :]
        self.py_seq_slot = self.py_batch_idx = None

    def create_child_request(self, request_id: int) -> LlmRequest:
        """A further sequence of this request: own id, own seed, own results."""
        config = dataclasses.replace(self.sampling_config)
        child = LlmRequest(request_id=request_id, sampling_config=config, **self._core_options())
        self._adopt(child)
        if config.seed is not None:
            config.seed += child.sequence_index
        for name, value in vars(self).items():
            if name.startswith("py_") and name not in _OF_EACH:
                setattr(child, name, copy.deepcopy(value))
        child.return_perf_metrics = self.return_perf_metrics
        self.child_requests.append(child)
        return child

    def create_response(self, use_fast_logits: bool = False, mpi_world_rank: int = 0) -> LlmResponse | None:
        """What is new since the last response; None if there is nothing to say yet."""
        result = self.create_serialized_result()
        if result is None:
            return None
        data, is_final = result
        answer = LlmResult(data, self._result_to_send(), is_final)
        answer.cached_tokens = self.cached_tokens
        request_id = self.parent_request_id if self.is_child else self.py_request_id
        assert request_id is not None
        return LlmResponse(request_id=request_id, result=answer, client_id=self.py_client_id)

    def create_serialized_result(self) -> tuple[bytes, bool] | None:
        """The new tokens with finish reason as bytes, and whether all sequences of the request have ended."""
        if not (self.is_finished or (self.streaming and self.is_generation_in_progress_state)):
            return None
        start = self._max_sent_token_len if self.streaming else self.orig_prompt_len
        tokens = self._tokens[start:]
        if not tokens and not self.is_finished:
            return None
        self._max_sent_token_len = len(self._tokens)
        self._sequence_final[self.sequence_index] = self.is_finished
        is_final = all(self._sequence_final)
        return pickle.dumps(self._make_result(tokens, is_final)), is_final

    def _make_result(self, tokens: list[int], is_final: bool) -> Result:
        return Result(
            output_token_ids=[tokens],
            finish_reasons=[self.finish_reason],
            is_final=is_final,
            is_sequence_final=self.is_finished,
            sequence_index=self.sequence_index,
            decoding_iter=self.py_decoding_iter,
            avg_decoded_tokens_per_iter=1.0 if self.py_decoding_iter else None,
            request_perf_metrics=self.perf_metrics if self.return_perf_metrics and self.is_finished else None,
        )

    def _result_to_send(self) -> PyResult:
        """The live results; a stream's next ones must not change what was sent."""
        return copy.deepcopy(self.py_result) if self.streaming and not self.is_finished else self.py_result


def get_draft_token_length(request: LlmRequest) -> int:
    """Number of draft tokens of the coming step."""
    return len(request.py_draft_tokens)


def executor_request_to_llm_request(
    req_id: int,
    executor_request: ExecutorRequest,
    child_req_ids: list[int] | None,
    exclude_last_generation_logits: bool,
    input_token_ids: list[int] | None = None,
) -> LlmRequest:
    """The engine's request for an executor's request, with one child for each of `child_req_ids`."""
    output = executor_request.output_config
    request = LlmRequest(
        request_id=req_id,
        max_new_tokens=executor_request.max_tokens,
        input_tokens=executor_request.input_token_ids if input_token_ids is None else input_token_ids,
        sampling_config=executor_request.sampling_config,
        is_streaming=executor_request.streaming,
        end_id=executor_request.end_id,
        pad_id=executor_request.pad_id,
        client_id=executor_request.client_id,
        cache_salt_id=executor_request.cache_salt_id,
        lora_task_id=getattr(executor_request.lora_config, "task_id", None),
        return_log_probs=output.return_log_probs,
        return_context_logits=output.return_context_logits,
        return_generation_logits=output.return_generation_logits,
        return_perf_metrics=output.return_perf_metrics,
        exclude_last_generation_logits=exclude_last_generation_logits,
        stop_words_list=executor_request.stop_words,
    )
    for name, default in _COPIED:
        setattr(request, name, getattr(executor_request, name, default))
    for child_id in child_req_ids or []:
        request.create_child_request(child_id)
    return request
