"""Hooks that drive the recorder from the engine's loop: construction, each forward, a reset."""

from __future__ import annotations

import contextvars
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..config import Config
from ..errors import NotReadyError, UnsupportedError, explain
from ..flow.causes import Cause
from .engine import ATTRIBUTE, CapturedEngine, captured
from .llm import config_of
from .manager import KEY, route_manager
from .native import Native, detect
from .runtime import guard, runtime
from .steps import fed_as_planned, read_spans

log = logging.getLogger("trtllm_r3")
_wanted: contextvars.ContextVar[Config | None] = contextvars.ContextVar("trtllm_r3_wanted", default=None)


def create_py_executor(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Around `create_py_executor(llm_args, ...)`: remember whether this engine is to return routes."""
    llm_args = kwargs["llm_args"] if "llm_args" in kwargs else args[0]
    with wanting(config_of(llm_args)):
        return wrapped(*args, **kwargs)


@contextmanager
def wanting(config: Config | None) -> Iterator[None]:
    """Engines built in this block capture under `config`; None: they do not."""
    token = _wanted.set(config)
    try:
        yield
    finally:
        _wanted.reset(token)


def executor_init(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> None:
    """Around `PyExecutor.__init__`, which warms up and captures graphs: hook the model before that."""
    config = _wanted.get()
    if config is None:
        wrapped(*args, **kwargs)
        return
    parts = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    engine = _attach(parts["model_engine"], parts["resource_manager"], config)
    wrapped(*args, **kwargs)
    if engine is not None:
        engine.warmed_up()


def _attach(model_engine: Any, resource_manager: Any, config: Config) -> CapturedEngine | None:
    if getattr(model_engine, "is_draft_model", False):
        return None
    if detect() is Native.PRESENT:
        log.warning("this engine returns routed experts by itself; its own recorder is left in charge")
        return None
    _check_ready()
    _check_model_engine(model_engine)
    engine = captured(model_engine)
    if engine is None:
        engine = CapturedEngine(model_engine, config)
        setattr(model_engine, ATTRIBUTE, engine)
    engine.warming_up()
    managers = resource_manager.resource_managers
    engine.share_blocks(managers)
    managers[KEY] = route_manager(_base_manager(managers), engine)
    return engine


def _check_ready() -> None:
    missing = runtime().patcher.missing()
    if missing:
        rows = "; ".join(f"{p.target.attribute} ({p.state.value}: {p.reason})" for p in missing)
        raise NotReadyError(
            explain(
                what="routed experts",
                expected="every required hook in place",
                found=rows,
                remedy="This TensorRT-LLM differs from the releases known; build the LLM without routes.",
            )
        )


def _check_model_engine(model_engine: Any) -> None:
    if getattr(model_engine, "spec_config", None) is not None:
        raise UnsupportedError(
            explain(
                what="speculative_config",
                expected="None",
                found=type(model_engine.spec_config).__name__,
                remedy="Rows of rejected drafts cannot be told apart; build the LLM without it.",
            )
        )


def _base_manager(managers: Any) -> type[Any]:
    for manager in managers.values():
        for cls in type(manager).__mro__:
            if cls.__name__ == "BaseResourceManager":
                return cls
    raise NotReadyError(
        explain(
            what="resource managers",
            expected="one derived from BaseResourceManager",
            found=", ".join(type(m).__name__ for m in managers.values()),
            remedy="This engine is not one that this package knows.",
        )
    )


def forward(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Around `PyTorchModelEngine.forward(scheduled_requests, resource_manager, new_tensors_device, ...)`."""
    engine = captured(instance)
    batch = args[0] if args else next(iter(kwargs.values()))
    if engine is None or getattr(instance, "is_warmup", False) or not hasattr(batch, "context_requests"):
        return wrapped(*args, **kwargs)
    recorder, spans = engine.recorder, None
    with guard("forward entry", engine):
        previous = args[2] if len(args) > 2 else kwargs.get("new_tensors_device")
        spans = read_spans(engine, batch, overlapped=previous is not None)
        recorder.begin_step(*spans)
    try:
        result = wrapped(*args, **kwargs)
    except BaseException:
        with guard("forward failed", engine):
            recorder.abort_step(Cause.FAULT)
        raise
    with guard("forward exit", engine):
        if recorder.open_layout is not None and spans is not None:
            _check_layout(engine, batch, spans, instance)
        recorder.end_step()
    return result


def _check_layout(engine: CapturedEngine, batch: Any, spans: Any, model_engine: Any) -> None:
    # Steps without a context request may run in a graph, whose metadata is another object.
    if not batch.context_requests:
        return
    same = fed_as_planned(batch, spans, getattr(model_engine, "attn_metadata", None))
    if same is None:
        engine.recorder.counters["steps_unchecked"] += 1
    elif not same:
        engine.recorder.abort_step(Cause.LAYOUT)


def reset_reuse_state(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Around `KVCacheManager.reset_reuse_state`: what was computed so far is found no more, nor its rows."""
    with guard("reset_reuse_state"):
        for engine in list(runtime().engines):
            if engine.blocks is not None and engine.blocks.manager is instance:
                engine.forget_prefixes()
    return wrapped(*args, **kwargs)


def reset_prefix_cache(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Around `PyExecutor.reset_prefix_cache`, which trainers call after new weights: a new version."""
    result = wrapped(*args, **kwargs)
    with guard("reset_prefix_cache"):
        runtime().reset()
    return result
