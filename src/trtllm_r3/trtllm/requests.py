"""The request option: from SamplingParams through processes and queues to the engine's own request."""

from __future__ import annotations

import contextvars
import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import RequestRefused, explain
from .engine import captured
from .runtime import guard, runtime

_CARRIER = "_return_log_probs"  # a slot of SamplingParams that the PyTorch backend never reads
_OURS = 1 << 60  # tells a packed value from one that stock code assigned
_TRUTH, _ASKED, _START = 1, 2, 8
_VERSION = "_trtllm_r3_version"


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants: whether routes, and from which position on."""

    asked: bool = False
    start: int = 0


class _Packed(int):
    """Reads as stock's flag, carries ours; pickles as a plain int, so that any process can load it."""

    def __bool__(self) -> bool:
        return bool(int(self) & _TRUTH)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def ask_of(params: Any) -> Ask:
    """What a SamplingParams asks for; nothing, if this process never edited the class."""
    value = getattr(params, _CARRIER, 0)
    if not isinstance(value, int) or not value & _OURS:
        return Ask()
    packed = int(value)
    return Ask(bool(packed & _ASKED), (packed & ~_OURS) // _START)


def set_ask(params: Any, ask: Ask) -> Any:
    """A copy of `params` that asks: callers reuse their objects for other engines."""
    params = copy.copy(params)
    _write(params, ask)
    return params


def _write(params: Any, ask: Ask) -> None:
    truth = _TRUTH if getattr(params, _CARRIER, False) else 0
    setattr(params, _CARRIER, _OURS | truth | ask.asked * _ASKED | ask.start * _START)


class _Carrier:
    """Stands before the slot: what stock code assigns changes its own bit and leaves ours."""

    def __init__(self, slot: Any) -> None:
        self.slot = slot

    def __get__(self, params: Any, owner: Any = None) -> Any:
        if params is None:
            return self
        value = self.slot.__get__(params, owner)
        return _Packed(value) if isinstance(value, int) and value & _OURS else value

    def __set__(self, params: Any, value: Any) -> None:
        try:
            old = int(self.slot.__get__(params, type(params)) or 0)
        except AttributeError:
            old = 0
        packed = isinstance(value, int) and value & _OURS
        if old & _OURS and not packed:
            value = (old & ~_TRUTH) | (_TRUTH if value else 0)
        self.slot.__set__(params, int(value) if packed else value)


def edit_sampling_params(cls: Any) -> Callable[[], None]:
    """Give SamplingParams our two properties; the class and its pickles stay what they are."""
    slot = vars(cls)[_CARRIER]

    def property_of(name: str, field: str) -> property:
        def get(self: Any) -> Any:
            return getattr(ask_of(self), field)

        def put(self: Any, value: Any) -> None:
            old = ask_of(self)
            _write(self, _checked(**{"asked": old.asked, "start": old.start, field: value}))

        return property(get, put, doc=f"Set by trtllm-r3: {name}.")

    added = {
        "return_routed_experts": property_of("return_routed_experts", "asked"),
        "routed_experts_start": property_of("routed_experts_start", "start"),
    }
    setattr(cls, _CARRIER, _Carrier(slot))
    for name, value in added.items():
        setattr(cls, name, value)

    def undo() -> None:
        setattr(cls, _CARRIER, slot)
        for name in added:
            delattr(cls, name)

    return undo


def sampling_params_init(original: Callable[..., None]) -> Callable[..., None]:
    """Replaces `SamplingParams.__init__`, which refuses keywords that it does not know."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        ask = _checked(kwargs.pop("return_routed_experts", False), kwargs.pop("routed_experts_start", 0))
        original(self, *args, **kwargs)
        if ask != Ask():
            _write(self, ask)

    return init


def _checked(asked: Any, start: Any) -> Ask:
    if not isinstance(asked, bool):
        raise RequestRefused(
            explain(what="return_routed_experts", expected="a bool", found=repr(asked), remedy="")
        )
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < 1 << 48:
        raise RequestRefused(
            explain(
                what="routed_experts_start", expected="a position, 0 or more", found=repr(start), remedy=""
            )
        )
    return Ask(asked, start)


def request_init(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Around `GenerationRequest.__init__`: the weight version that `reset()` announced rides along."""
    wrapped(*args, **kwargs)
    with guard("GenerationRequest"):
        if runtime().weight_version:
            setattr(instance, _VERSION, runtime().weight_version)


_NOTHING = Ask()
_asking: contextvars.ContextVar[Ask] = contextvars.ContextVar("trtllm_r3_asking", default=_NOTHING)


def worker_enqueue(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Around `BaseWorker._enqueue_request(request)`, which turns it into an executor request."""
    ask = Ask()
    with guard("_enqueue_request"):
        request = kwargs["request"] if "request" in kwargs else args[0]
        runtime().reach(getattr(request, _VERSION, 0))
        ask = ask_of(request.sampling_params)
    if ask.asked:
        _refuse_if_deaf(instance.engine)
    token = _asking.set(ask)
    try:
        return wrapped(*args, **kwargs)
    finally:
        _asking.reset(token)


def _refuse_if_deaf(executor: Any) -> None:
    engine = captured(getattr(executor, "model_engine", None))
    found = "no capture in this worker" if engine is None else engine.recorder.degraded
    if found:
        refused = explain(
            what="return_routed_experts",
            expected="an engine that captures",
            found=found,
            remedy="Send the request without it; see trtllm_r3.status() in the worker.",
        )
        # The worker fails a single request for this type only.
        alone = getattr(sys.modules.get("tensorrt_llm.executor.utils"), "RequestError", RequestRefused)
        raise alone(refused) from RequestRefused(refused)


def executor_enqueue(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Around `PyExecutor.enqueue_request(request, ...)`, on the same thread."""
    with guard("enqueue_request"):
        ask = _asking.get()
        if ask.asked:
            request = kwargs["request"] if "request" in kwargs else args[0]
            request.py_return_routed_experts = True
            request.py_routed_experts_start = ask.start
    return wrapped(*args, **kwargs)


def to_llm_request(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Around `executor_request_to_llm_request(req_id, executor_request, ...)`: parent and children."""
    llm_request = wrapped(*args, **kwargs)
    with guard("executor_request_to_llm_request"):
        source = kwargs["executor_request"] if "executor_request" in kwargs else args[1]
        if getattr(source, "py_return_routed_experts", False):
            for request in (llm_request, *llm_request.child_requests):
                request.py_return_routed_experts = True
                request.py_routed_experts_start = source.py_routed_experts_start
    return llm_request
