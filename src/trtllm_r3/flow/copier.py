"""From device to host without making anybody wait.

Each step's rows are copied within the device first (the next forward may then overwrite the buffer)
and travel to the host on a side stream. A slot of the ring is taken until its rows are committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .layout import StepLayout


class Event(Protocol):
    """What a ticket needs of a CUDA event."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Something that runs a copy later, after all work queued so far on the current stream."""

    def after_current(self, copy: Callable[[], None]) -> Event: ...


class CudaStream:
    """A side stream of the device; copies run when the work queued before them has finished."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def after_current(self, copy: Callable[[], None]) -> Event:
        """Queue `copy` behind the current stream; the event tells when it is done."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            copy()
            done: Event = self.stream.record_event()
            return done


class LazyEvent:
    """The copy itself, run when somebody asks for its result."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self.copy: Callable[[], None] | None = copy

    def synchronize(self) -> None:
        """Run the copy if it has not run."""
        if self.copy is not None:
            self.copy()
            self.copy = None

    def query(self) -> bool:
        """Always done, by doing it."""
        self.synchronize()
        return True


class LazyStream:
    """The CPU's side stream: as late as a copy may ever be, so that order faults show without a GPU."""

    def after_current(self, copy: Callable[[], None]) -> Event:
        """Put the copy off until its event is asked."""
        return LazyEvent(copy)


@dataclass(slots=True)
class _Slot:
    device_RLK: torch.Tensor
    host_RLK: torch.Tensor


@dataclass(slots=True)
class Ticket:
    """The rows of one step on their way; `host_RLK` may be read once `done`."""

    layout: StepLayout
    slot: _Slot
    done: Event

    @property
    def host_RLK(self) -> torch.Tensor:
        """[rows of the step, L, K], valid until the ticket is released."""
        return self.slot.host_RLK[: self.layout.rows]


class RouteCopier:
    """A ring of staging slots. Nothing here waits, except `wait` on one ticket's own event."""

    def __init__(self, like_RLK: torch.Tensor, slots: int, stream: Stream | None = None) -> None:
        on_gpu = like_RLK.device.type == "cuda"
        self.stream = stream or (CudaStream(like_RLK.device) if on_gpu else LazyStream())
        with torch.inference_mode(False):
            self._free = [
                _Slot(
                    torch.empty_like(like_RLK),
                    torch.empty(like_RLK.shape, dtype=like_RLK.dtype, pin_memory=on_gpu),
                )
                for _ in range(slots)
            ]
        self.tickets: deque[Ticket] = deque()
        self.waits = 0

    def stage(self, layout: StepLayout, routes_RLK: torch.Tensor) -> bool:
        """Take the step's rows off the buffer. False if every slot is still on its way."""
        if not self._free:
            return False
        rows, slot = layout.rows, self._free.pop()
        device, host = slot.device_RLK[:rows], slot.host_RLK[:rows]
        device.copy_(routes_RLK[:rows])
        done = self.stream.after_current(lambda: void(host.copy_(device, non_blocking=True)))
        self.tickets.append(Ticket(layout, slot, done))
        return True

    def landed(self, through: int = -1) -> Ticket | None:
        """The oldest ticket if its rows are on the host; one of step <= `through` is waited for."""
        if not self.tickets:
            return None
        ticket = self.tickets[0]
        if not ticket.done.query():
            if ticket.layout.step > through:
                return None
            self.waits += 1
            ticket.done.synchronize()
        return self.tickets.popleft()

    def release(self, ticket: Ticket) -> None:
        """The ticket's rows have been read; its slot may be used again."""
        self._free.append(ticket.slot)


def void(_: object) -> None:
    """Drop a value, where a callable must return None."""
