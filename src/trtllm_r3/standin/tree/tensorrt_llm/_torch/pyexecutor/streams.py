"""Streams and events of the engine's device; on CPU ones that have nothing to wait for."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..device import get_device


class NullEvent:
    """An event on CPU: whatever was launched before it is done."""

    def record(self, stream: Any = None) -> None:
        """Mark this point of the stream."""

    def wait(self, stream: Any = None) -> None:
        """Let the stream wait for the event."""

    def synchronize(self) -> None:
        """Wait for the event."""

    def query(self) -> bool:
        """Whether the event has passed."""
        return True


class NullStream:
    """A stream on CPU: work runs where it is launched."""

    def wait_stream(self, stream: Any) -> None:
        """Let this stream wait for what another one holds."""

    def wait_event(self, event: Any) -> None:
        """Let this stream wait for an event."""

    def record_event(self, event: Any = None) -> Any:
        """Mark this point of the stream."""
        return event or NullEvent()

    def synchronize(self) -> None:
        """Wait for everything in the stream."""

    def query(self) -> bool:
        """Whether the stream is empty."""
        return True


_NULL_STREAM = NullStream()


def on_cuda() -> bool:
    """Whether the engine runs on a CUDA device."""
    return get_device().type == "cuda"


def new_stream() -> Any:
    """A stream of the engine's device."""
    return torch.cuda.Stream() if on_cuda() else NullStream()


def current_stream() -> Any:
    """The stream that this thread launches on."""
    return torch.cuda.current_stream() if on_cuda() else _NULL_STREAM


def use_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Launch on `stream` within the block."""
    return torch.cuda.stream(stream) if on_cuda() else contextlib.nullcontext(stream)


def recorded_event() -> Any:
    """An event recorded now on the current stream."""
    if not on_cuda():
        return NullEvent()
    event = torch.cuda.Event()
    event.record()
    return event


def synchronize() -> None:
    """Wait for the device."""
    if on_cuda():
        torch.cuda.synchronize()


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor on the engine's device, copied without waiting."""
    if not on_cuda():
        return tensor
    return tensor.pin_memory().to(get_device(), non_blocking=True)
