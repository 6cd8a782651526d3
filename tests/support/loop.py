"""An executor of the stand-in without the front: requests in, responses out, its steps observable."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tensorrt_llm._torch.pyexecutor.llm_request import LlmResponse
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor
from tensorrt_llm.bindings.executor import OutputConfig, Request, SamplingConfig
from tensorrt_llm.llmapi import CapacitySchedulerPolicy, CudaGraphConfig, KvCacheConfig, SchedulerConfig
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

WAIT = dt.timedelta(seconds=20)


def arguments(
    model: str,
    *,
    kv_tokens: int | None = 2048,
    block: int = 8,
    reuse: bool = True,
    policy: str = "GUARANTEED_NO_EVICT",
    graphs: Sequence[int] = (),
    **options: Any,
) -> TorchLlmArgs:
    """Options of a small engine; graphs of these batch sizes, with padding."""
    cache = KvCacheConfig(max_tokens=kv_tokens, tokens_per_block=block, enable_block_reuse=reuse)
    whole = {
        "max_batch_size": 8,
        "max_num_tokens": 64,
        "max_seq_len": 256,
        "skip_tokenizer_init": True,
        "kv_cache_config": cache,
        "scheduler_config": SchedulerConfig(capacity_scheduler_policy=CapacitySchedulerPolicy[policy]),
        "cuda_graph_config": CudaGraphConfig(batch_sizes=list(graphs), enable_padding=True)
        if graphs
        else None,
        "enable_chunked_prefill": True,
        **options,
    }
    return TorchLlmArgs(model=model, **whole)


@contextlib.contextmanager
def executor(model: str, **options: Any) -> Iterator[PyExecutor]:
    """An executor whose loop runs."""
    built = create_py_executor(arguments(model, **options))
    try:
        yield built
    finally:
        built.shutdown()


def enqueue(running: PyExecutor, requests: Sequence[Request]) -> list[int]:
    """Ids of requests that the loop sees at once."""
    with running.control_action():
        return running.enqueue_requests(list(requests))


def request(
    tokens: Sequence[int],
    max_tokens: int = 8,
    *,
    end_id: int | None = -1,
    streaming: bool = False,
    stop_words: list[list[int]] | None = None,
    output: dict[str, Any] | None = None,
    py: dict[str, Any] | None = None,
    **sampling: Any,
) -> Request:
    """A request as the worker makes it."""
    made = Request(
        input_token_ids=list(tokens),
        max_tokens=max_tokens,
        streaming=streaming,
        end_id=end_id,
        stop_words=stop_words,
        sampling_config=SamplingConfig(**sampling),
        output_config=OutputConfig(exclude_input_from_output=True, **(output or {})),
        client_id=sum(tokens),
    )
    for name, value in (py or {}).items():
        setattr(made, name, value)
    return made


def answers(running: PyExecutor, ids: Sequence[int]) -> list[list[LlmResponse]]:
    """All responses of each request, until its last one or its error."""
    found: dict[int, list[LlmResponse]] = {request_id: [] for request_id in ids}
    while not all(responses and _is_last(responses[-1]) for responses in found.values()):
        came = running.await_responses(timeout=WAIT)
        assert came, f"nothing came within {WAIT}; so far {found}"
        for response in came:
            if response.result is not None:
                response.result.deserialize()
            found[response.request_id].append(response)
    return list(found.values())


def _is_last(response: LlmResponse) -> bool:
    return response.has_error() or bool(response.result and response.result.is_final)


def tokens_of(running: PyExecutor, requests: Sequence[Request]) -> list[list[int]]:
    """Tokens that each request generates, all enqueued together."""
    ids = enqueue(running, requests)
    return [
        [token for response in responses for token in _result(response).output_token_ids[0]]
        for responses in answers(running, ids)
    ]


def _result(response: LlmResponse) -> Any:
    assert response.result is not None, response.error_msg
    return response.result


@contextlib.contextmanager
def watched(
    owner: Any, names: Sequence[str], log: list[Any], note: Callable[[str, Any], Any] | None = None
) -> Iterator[None]:
    """Within, calls of these methods of an object are logged before they run: by name, or as `note` says."""
    for name in names:
        setattr(owner, name, _watch(getattr(owner, name), name, log, note))
    try:
        yield
    finally:
        for name in names:
            delattr(owner, name)


def _watch(original: Any, name: str, log: list[Any], note: Callable[[str, Any], Any] | None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(note(name, args) if note else name)
        return original(*args, **kwargs)

    return call
