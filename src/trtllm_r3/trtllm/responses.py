"""The rows' way out: from the engine's request to `CompletionOutput.routed_experts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import RoutesMismatch, RoutesMissing, explain
from ..flow.payload import Payload, pack_none, unpack
from ..flow.recorder import Track
from ..flow.routes import Routes
from ..plugins import manager
from .engine import ATTRIBUTE
from .requests import ask_of
from .runtime import guard, runtime

_IDS, _META = "_trtllm_r3_ids", "_trtllm_r3_meta"  # on `response.result`
_KEY = "routed_experts"
_UNFINISHED = "not finished"


class RouteOutputs(dict[str, Any]):
    """`CompletionOutput.additional_generation_outputs` with the Routes beside the plain tensor.

    The engine slices every value of that dictionary when it trims a stop word, so the values stay tensors.
    """

    routes: Routes

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (dict(self), self.routes)


def _rebuild(values: dict[str, Any], routes: Routes) -> RouteOutputs:
    outputs = RouteOutputs(values)
    outputs.routes = routes
    return outputs


def create_response(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Around `LlmRequest.create_response(...)`: the finished sequence's rows go onto the result."""
    response = wrapped(*args, **kwargs)
    if response is None or not getattr(instance, "py_return_routed_experts", False):
        return response
    with guard("create_response"):
        if instance.is_finished and response.result is not None:
            payload = pack_none("the worker failed to assemble them", {})
            with guard("finish"):
                payload = _payload(instance)
            setattr(response.result, _IDS, payload.ids)
            setattr(response.result, _META, payload.meta)
    return response


def _payload(request: Any) -> Payload:
    track: Track | None = getattr(request, ATTRIBUTE, None)
    if track is None:
        return pack_none("ended before it was computed", {})
    num_tokens = request.get_num_tokens(0)
    return track.recorder.finish(
        track, num_tokens=num_tokens, generated=num_tokens - request.py_orig_prompt_len
    )


def handle_sequence(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Around `GenerationResultBase._handle_sequence(finish_reasons, response_tensors, sequence_index)`."""
    result = wrapped(*args, **kwargs)
    index, done = None, False
    with guard("_handle_sequence"):
        reasons, tensors, index = (
            kwargs[name] if name in kwargs else args[i]
            for i, name in enumerate(("finish_reasons", "response_tensors", "sequence_index"))
        )
        if ask_of(instance.sampling_params).asked:
            _receive(instance, reasons, tensors, index)
        done = True
    with guard("_handle_sequence failed"):
        if not done and index is not None:
            _leave(instance._outputs[index], Routes(None, why_none="a fault on this side; see status()"))
    return result


def _receive(result: Any, reasons: Any, tensors: Any, index: int) -> None:
    output, meta = result._outputs[index], getattr(tensors, _META, None)
    if meta is not None:
        routes = unpack(Payload(getattr(tensors, _IDS), meta), len(output.token_ids))
        if "pid" in routes.counters:
            runtime().heard_from(str(routes.counters["pid"]), routes.counters)
    elif reasons and reasons[0].name != "NOT_FINISHED":
        routes = Routes(None, why_none="worker not armed")
    else:
        # A streamed chunk; the last one brings the rows, unless the caller finds a stop string in the text
        # and never waits for it.
        _leave(output, Routes(None, why_none=_UNFINISHED))
        return
    _leave(output, routes)
    manager().hook.trtllm_r3_finished(request_id=result.id, index=index, routes=routes)


def _leave(output: Any, routes: Routes) -> None:
    values = dict(output.additional_generation_outputs or {})
    if routes.ids is not None:
        values[_KEY] = routes.ids
    output.additional_generation_outputs = _rebuild(values, routes)


def routes_of(completion: Any) -> Routes:
    """See `trtllm_r3.routes_of`."""
    if not hasattr(completion, "token_ids"):
        raise RoutesMismatch(
            explain(
                what="routes_of",
                expected="a CompletionOutput, as in result.outputs[0]",
                found=type(completion).__name__,
                remedy="Pass one of the outputs.",
            )
        )
    outputs = getattr(completion, "additional_generation_outputs", None)
    finished = getattr(completion, "finish_reason", None) is not None
    if isinstance(outputs, RouteOutputs):
        cut_short = finished and outputs.routes.why_none == _UNFINISHED
        return Routes(None, why_none="stopped in text") if cut_short else outputs.routes
    ids = _plain(outputs)
    if ids is not None:
        return Routes(ids, source="native")
    return Routes(None, why_none="not asked for" if finished else f"{_UNFINISHED}, or not asked for")


def _plain(outputs: Any) -> torch.Tensor | None:
    """The tensor as native code leaves it: bare, or in a list of one or several parts."""
    found = outputs.get(_KEY) if isinstance(outputs, dict) else None
    if isinstance(found, (list, tuple)):
        return torch.cat(list(found)) if found else None
    return found


def edit_completion_output(cls: Any) -> Callable[[], None]:
    """Give CompletionOutput the property `routed_experts`; it has slots, nothing else can be added."""

    def routed_experts(self: Any) -> torch.Tensor | None:
        """int16 CPU tensor [S-1, num_moe_layers, top_k], -1 = missing; None: see `trtllm_r3.routes_of`."""
        outputs = self.additional_generation_outputs
        strict = isinstance(outputs, RouteOutputs) and runtime().config.on_gap == "error"
        if strict and self.finish_reason is not None:
            _raise_if_incomplete(routes_of(self))
        return _plain(outputs)

    cls.routed_experts = property(routed_experts)

    def undo() -> None:
        del cls.routed_experts

    return undo


def _raise_if_incomplete(routes: Routes) -> None:
    if not routes.complete:
        gaps = ", ".join(f"{g.start}..{g.stop - 1} ({g.cause})" for g in routes.gaps[:8])
        raise RoutesMissing(
            explain(
                what="routed experts",
                expected="every row",
                found=gaps or str(routes.why_none),
                remedy="trtllm_r3.routes_of(output) gives the rows that are there.",
            )
        )
