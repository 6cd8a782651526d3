"""A worker without a model, for tests of the front: token k of a request is its prompt's sum plus k."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tensorrt_llm.bindings.executor import FinishReason
from tensorrt_llm.executor import GenerationExecutor, GenerationExecutorProxy, GenerationExecutorWorker
from tensorrt_llm.executor.result import Logprob

CRASH, RAISE, REFUSE, ERROR, SLOW = 9001, 9002, 9003, 9004, 9005
"""First prompt tokens that kill the process, raise in the loop, are not taken, fail alone, or never end."""


@dataclass
class FakeResponse:
    request_id: int
    client_id: int
    result: Any = None
    error_msg: str | None = None

    def has_error(self) -> bool:
        return self.error_msg is not None


@dataclass
class Sequence:
    request: Any
    request_id: int
    index: int
    tokens: list[int] = field(default_factory=list)
    sent: int = 0
    reason: FinishReason = FinishReason.NOT_FINISHED

    def step(self) -> None:
        request = self.request
        self.tokens.append((sum(request.input_token_ids) + self.index * 100 + len(self.tokens)) % 1000)
        if any(self.tokens[-len(word) :] == word for word in request.stop_words or []):
            self.reason = FinishReason.STOP_WORDS
        elif self.tokens[-1] == request.end_id:
            self.reason = FinishReason.END_ID
        elif len(self.tokens) >= request.max_tokens:
            self.reason = FinishReason.LENGTH

    def response(self, final: bool) -> FakeResponse:
        fresh = self.tokens[self.sent :] if self.request.streaming else self.tokens
        self.sent = len(self.tokens)
        count = getattr(self.request, "py_num_logprobs", None)
        logprobs = [[{t: Logprob(-0.5, 1)} for t in self.tokens]] if count else None
        result = SimpleNamespace(
            output_token_ids=[list(fresh)],
            finish_reasons=[self.reason],
            is_final=final,
            is_sequence_final=self.reason is not FinishReason.NOT_FINISHED,
            sequence_index=self.index,
            decoding_iter=len(self.tokens),
            log_probs=logprobs,
            cum_log_probs=[-0.5 * len(self.tokens)] if count else None,
        )
        return FakeResponse(self.request_id, self.request.client_id, result)


class FakeEngine:
    def __init__(self, max_seq_len: int = 64) -> None:
        self.max_seq_len = max_seq_len
        self.is_shutdown = False
        self._lock = threading.Condition()
        self._active: dict[int, list[Sequence]] = {}
        self._next = 7
        self._stats: list[Any] = [{"iter": 1, "note": os.environ.get("TLLM_FAKE_NOTE")}]

    def enqueue_request(self, request: Any, query: Any = None) -> int:
        if request.input_token_ids[0] == REFUSE:
            raise ValueError("this prompt is not taken")
        with self._lock:
            self._next += 1
            count = request.sampling_config.num_return_sequences or 1
            self._active[self._next] = [Sequence(request, self._next, i) for i in range(count)]
            self._lock.notify()
            return self._next

    def cancel_request(self, request_id: int) -> None:
        with self._lock:
            for sequence in self._active.get(request_id, []):
                sequence.reason = FinishReason.CANCELLED

    def can_enqueue_requests(self) -> bool:
        return not self.is_shutdown

    def shutdown(self) -> None:
        self.is_shutdown = True

    def get_latest_iteration_stats(self) -> list[Any]:
        stats, self._stats = self._stats, []
        return stats

    def await_responses(self, id: Any = None, timeout: Any = None) -> list[FakeResponse]:
        with self._lock:
            if not self._active:
                self._lock.wait(timeout.total_seconds())
            responses = [r for request_id in list(self._active) for r in self._advance(request_id)]
        time.sleep(0.002)
        return responses

    def _advance(self, request_id: int) -> list[FakeResponse]:
        sequences = self._active[request_id]
        request = sequences[0].request
        first = request.input_token_ids[0]
        if first == CRASH:
            os._exit(3)
        if first == RAISE:
            raise RuntimeError("the loop broke")
        if first == ERROR:
            del self._active[request_id]
            return [FakeResponse(request_id, request.client_id, None, "this request failed")]
        out = []
        for sequence in list(sequences):
            if sequence.reason is FinishReason.NOT_FINISHED:
                if first == SLOW and len(sequence.tokens) == 3:
                    continue
                sequence.step()
            done = sequence.reason is not FinishReason.NOT_FINISHED
            if done:
                sequences.remove(sequence)
            if done or request.streaming:
                out.append(sequence.response(final=not sequences))
        if not sequences:
            del self._active[request_id]
        return out


class FakeWorker(GenerationExecutorWorker):
    def setup_engine(self) -> None:
        wish = os.environ.get("TLLM_FAKE_ENGINE")
        if wish == "broken":
            raise ValueError("no such engine")
        if wish == "dies":
            os._exit(4)
        self.engine = FakeEngine(self.llm_args.max_seq_len or 64)
        self.max_seq_len = self.engine.max_seq_len


class InProcess(GenerationExecutor):
    @staticmethod
    def create(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return FakeWorker(engine, llm_args=kwargs["llm_args"], is_llm_executor=True)


class InWorker(GenerationExecutor):
    @staticmethod
    def create(engine: Any, *args: Any, **kwargs: Any) -> Any:
        worker_kwargs = {"engine": engine, "llm_args": kwargs["llm_args"], "tokenizer": kwargs["tokenizer"]}
        return GenerationExecutorProxy(
            worker_kwargs, mpi_session=kwargs["mpi_session"], worker_cls=FakeWorker, is_llm_executor=True
        )


def numbers(prompt: list[int], count: int, index: int = 0) -> list[int]:
    """The tokens that the fake engine generates."""
    return [(sum(prompt) + index * 100 + k) % 1000 for k in range(count)]
