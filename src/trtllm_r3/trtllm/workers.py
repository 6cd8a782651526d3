"""Into the worker processes: a task that is submitted arms the process before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import Config
from .runtime import runtime


def submit(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Around `MpiSession.submit(task, *args, **kwargs)` and `submit_sync`."""
    task, *rest = args
    if task is run_task:
        return wrapped(*args, **kwargs)
    return wrapped(run_task, runtime().config.to_dict(), task, *rest, **kwargs)


def run_task(config: dict[str, Any], task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the worker: needs no environment, only that this package can be imported there."""
    runtime().enable(Config(**config))
    return task(*args, **kwargs)
