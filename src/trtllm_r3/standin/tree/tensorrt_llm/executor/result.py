"""Results: what responses become on the caller's side."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..bindings.executor import FinishReason
from ..disaggregated_params import DisaggregatedParams
from ..llmapi.utils import AsyncQueue, print_traceback_on_error
from ..sampling_params import LogprobParams, SamplingParams
from .completion import CompletionOutput, Logprob, LogProbsResult, TokenLogprobs, add_logprobs
from .detokenize import extend_text, find_stop_string, full_text
from .future import ResponseFuture
from .iteration_result import IterationResult
from .response_extras import ResponseWrapper, durations
from .utils import ErrorResponse, has_event_loop, is_llm_response

if TYPE_CHECKING:
    from ..llmapi.tokenizer import TokenizerBase
    from .executor import GenerationExecutor
    from .request import GenerationRequest

__all__ = [
    "CompletionOutput",
    "DetokenizedGenerationResultBase",
    "GenerationResult",
    "GenerationResultBase",
    "IterationResult",
    "LogProbsResult",
    "Logprob",
    "TokenLogprobs",
]


_FINISH_NAMES = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timeout",
    FinishReason.CANCELLED: "cancelled",
}


class GenerationResultBase:
    """The outputs of one request, fed with responses."""

    def __init__(
        self,
        id: int,
        sampling_params: SamplingParams,
        ray_queue: Any = None,
        background_error_handler: Callable[..., Any] | None = None,
        postproc_params: Any = None,
    ) -> None:
        del ray_queue
        self.id = id
        self.sampling_params = sampling_params
        self.postproc_params = postproc_params
        self.disaggregated_params: DisaggregatedParams | None = None
        self.decoding_iter = 0
        self.cached_tokens = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self._done = False
        self.metrics_dict: dict[str, float] = {}
        self.aqueue = AsyncQueue() if has_event_loop() else None
        self.queue: Any = self.aqueue.sync_q if self.aqueue is not None else queue.Queue()
        self._outputs = [CompletionOutput(index) for index in range(sampling_params.best_of or 1)]
        self._context_logits: torch.Tensor | None = None
        self._background_error_handler = (
            None if background_error_handler is None else weakref.WeakMethod(background_error_handler)
        )
        self._params_transmitted = False

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The `n` sequences."""
        return self._outputs[: self.sampling_params.n]

    @property
    def context_logits(self) -> torch.Tensor | None:
        """Logits of the prompt's tokens, float32 `[prompt, vocab]`, if asked for."""
        return self._context_logits

    def _handle_sequence(
        self,
        finish_reasons: list[FinishReason],
        response_tensors: Any,
        sequence_index: int,
        logprobs_result: LogProbsResult | None = None,
        req_perf_metrics_dict: dict[str, float] | None = None,
    ) -> None:
        """Add what one response says of one sequence."""
        output = self._outputs[sequence_index]
        output.disaggregated_params = self.disaggregated_params
        output._last_token_ids_len = len(output.token_ids)
        output.token_ids.extend(response_tensors.output_token_ids[0])
        add_logprobs(output, response_tensors, logprobs_result)
        logits = getattr(response_tensors, "generation_logits", None)
        if logits is not None:
            output.generation_logits = logits[0, : output.length]
        for name in ("additional_context_outputs", "additional_generation_outputs", "request_perf_metrics"):
            value = getattr(response_tensors, name, None)
            if value is not None:
                setattr(output, name, value)
        reason = finish_reasons[0] if finish_reasons else FinishReason.NOT_FINISHED
        if reason is FinishReason.CANCELLED:
            output.finish_reason = "cancelled"
        if self._done or getattr(response_tensors, "is_sequence_final", False):
            self._finish_sequence(output, reason)
        if self._done and req_perf_metrics_dict:
            self.metrics_dict = durations(req_perf_metrics_dict, output.length, self.sampling_params.n > 1)

    def _finish_sequence(self, output: CompletionOutput, reason: FinishReason) -> None:
        """Set why it ended; take the stop word off unless the user wants to see it."""
        if reason not in _FINISH_NAMES:
            raise ValueError(f"a finished sequence has finish reason {reason}")
        output.finish_reason = _FINISH_NAMES[reason]
        if reason is not FinishReason.STOP_WORDS:
            return
        for stop_reason, stop_ids in self.sampling_params._get_stop_reasons_and_words():
            if output.token_ids[-len(stop_ids) :] == stop_ids:
                output.stop_reason = stop_reason
                if not self.sampling_params.include_stop_str_in_output:
                    output.token_ids = output.token_ids[: -len(stop_ids)]
                return

    @print_traceback_on_error
    def _handle_response(self, response: Any) -> None:
        """Take a response; raises what it reports: RequestError for this request, or the engine's end."""
        wrapper = response if isinstance(response, ResponseWrapper) else ResponseWrapper(response)
        response = wrapper._response
        if isinstance(response, ErrorResponse):
            self._done = True
            self._raise_background_error(response.error_msg)
        elif not is_llm_response(response):
            raise ValueError(f"unknown response type: {response}")
        elif response.has_error():
            self._done = True
            self._raise_background_error(response.error_msg)
        else:
            self._handle_llm_result(response.result, wrapper)
            self._raise_background_error()

    def _handle_llm_result(self, result: Any, extras: ResponseWrapper) -> None:
        if isinstance(getattr(result, "_result", None), bytes):
            result.deserialize()
        self._done = result.is_final
        self.decoding_iter = result.decoding_iter
        self.cached_tokens = getattr(result, "cached_tokens", 0)
        self.avg_decoded_tokens_per_iter = getattr(result, "avg_decoded_tokens_per_iter", None)
        self._handle_sequence(
            result.finish_reasons,
            result,
            result.sequence_index,
            extras.logprobs,
            extras.request_perf_metrics,
        )
        context_logits = getattr(result, "context_logits", None)
        if context_logits is not None:
            self._context_logits = context_logits

    def _raise_background_error(self, *error: Any) -> None:
        handler = self._background_error_handler and self._background_error_handler()
        if handler:
            handler(*error)
        elif error:
            raise error[0] if isinstance(error[0], BaseException) else RuntimeError(error[0])

    def abort(self) -> None:
        """End the request; a result that waits for no engine has nothing to end."""


class DetokenizedGenerationResultBase(GenerationResultBase):
    """A result that also makes text, and ends at stop strings that only the text shows."""

    def __init__(
        self,
        id: int,
        sampling_params: SamplingParams,
        tokenizer: TokenizerBase | None = None,
        streaming: bool = False,
        background_error_handler: Callable[..., Any] | None = None,
        postproc_params: Any = None,
    ) -> None:
        super().__init__(
            id,
            sampling_params,
            background_error_handler=background_error_handler,
            postproc_params=postproc_params,
        )
        self.tokenizer = tokenizer
        self._streaming = streaming

    def _handle_response(self, response: Any) -> None:
        GenerationResultBase._handle_response(self, response)
        if not self.sampling_params.detokenize or self.tokenizer is None:
            return
        was_done = self._done
        for output in self.outputs:
            self._detokenize(output)
            if not was_done or output.finish_reason in ("stop", "length"):
                self._stop_in_text(output)

    def _detokenize(self, output: CompletionOutput) -> None:
        assert self.tokenizer is not None
        ended = self._done or output.finish_reason is not None
        output._last_text_len = len(output.text)
        if self._streaming:
            output.text, output._incremental_states = extend_text(
                self.tokenizer,
                self.sampling_params,
                output.token_ids,
                output.text,
                output._incremental_states,
                ended,
            )
        else:
            output.text = full_text(self.tokenizer, self.sampling_params, output.token_ids)

    def _stop_in_text(self, output: CompletionOutput) -> None:
        found = find_stop_string(self.sampling_params, output.text)
        if found is None:
            return
        output.stop_reason, end = found
        output.finish_reason, output.text = "stop", output.text[:end]
        self.abort()
        self._done = True


class GenerationResult(GenerationResultBase, ResponseFuture):
    """The future of a request: iterate it (streaming), wait with `result()`, or await it."""

    def __init__(
        self,
        generation_request: GenerationRequest,
        background_error_handler: Callable[..., Any] | None = None,
        executor: GenerationExecutor | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
        logprob_params: LogprobParams | None = None,
    ) -> None:
        assert generation_request.id is not None
        super().__init__(
            generation_request.id,
            generation_request.sampling_params,
            None,
            background_error_handler,
            postproc_params=generation_request.postproc_params,
        )
        self._generation_request = generation_request
        self._streaming = generation_request.streaming
        self.disaggregated_params = disaggregated_params
        self._logprob_params = logprob_params
        self._executor = weakref.ref(executor) if executor is not None else None
        self._aborted = False

    @property
    def request_id(self) -> int:
        """Number of the request."""
        return self.id

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self._generation_request.prompt_token_ids

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return self._done

    def abort(self) -> None:
        """Ask the engine to end the request; the tokens so far still arrive, finish reason "cancelled"."""
        executor = self._executor and self._executor()
        if executor:
            executor.abort_request(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted

    def _repr_fields(self) -> list[str]:
        return ["request_id", "prompt_token_ids", "outputs", "finished", "context_logits"]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._repr_fields())
        return f"{type(self).__name__}({fields})"

    def __hash__(self) -> int:
        return hash(self.request_id)
