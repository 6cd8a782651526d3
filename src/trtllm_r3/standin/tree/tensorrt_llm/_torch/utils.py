"""State and names that several parts of the PyTorch backend share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from functools import wraps
from typing import Any

_state = threading.local()
_is_torch_compiling = False


class EventType(Enum):
    """Events between the streams of a layer."""

    Main = 0
    Attention = 1
    MoeShared = 2
    MoeChunkingOverlap = 3


class AuxStreamType(Enum):
    """Streams beside the main one."""

    Attention = 1
    MoeShared = 2
    MoeChunkingOverlap = 3
    MoeBalancer = 4


def set_torch_compiling(enable: bool) -> None:
    """Say that the model runs compiled from now on, or not."""
    global _is_torch_compiling
    _is_torch_compiling = enable


def is_torch_compiling() -> bool:
    """Whether the model runs compiled."""
    return _is_torch_compiling


def get_model_extra_attrs() -> dict[str, Any] | None:
    """`extra_attrs` of the model that this thread runs, None outside of a forward."""
    return getattr(_state, "model_extra_attrs", None)


@contextlib.contextmanager
def model_extra_attrs(attrs: dict[str, Any]) -> Iterator[None]:
    """Make `attrs` those of the running model within."""
    before = get_model_extra_attrs()
    _state.model_extra_attrs = attrs
    try:
        yield
    finally:
        _state.model_extra_attrs = before


def with_model_extra_attrs(
    get_attrs: Callable[[Any], dict[str, Any]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a method: it runs with `get_attrs(self)` as those of the running model."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with model_extra_attrs(get_attrs(self)):
                return method(self, *args, **kwargs)

        return run

    return decorate
