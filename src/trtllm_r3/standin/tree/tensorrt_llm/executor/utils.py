"""Messages and helpers shared by the proxy and the worker."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple


class RequestError(RuntimeError):
    """One request failed; the engine and all other requests go on."""


class ErrorResponse(NamedTuple):
    """A failure: `error_msg` is a text or RequestError (this request alone) or another exception."""

    client_id: int
    error_msg: str | BaseException
    request_id: int


class WorkerCommIpcAddrs(NamedTuple):
    """Addresses (endpoint, key) of the queues between proxy and worker."""

    request_queue_addr: tuple[str, bytes]
    worker_init_status_queue_addr: tuple[str, bytes]
    result_queue_addr: tuple[str, bytes]
    stats_queue_addr: tuple[str, bytes]


def has_event_loop() -> bool:
    """Whether an asyncio loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_llm_response(instance: Any) -> bool:
    """Whether this is an engine's response (with or without an error)."""
    return hasattr(instance, "has_error")
