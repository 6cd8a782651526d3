"""A side stream whose copies are done when the test says so, and whose events refuse a wait not allowed."""

from __future__ import annotations

from collections.abc import Callable


class HeldEvent:
    """One copy in flight."""

    def __init__(self, stream: HeldStream, copy: Callable[[], None]) -> None:
        self.stream, self.copy, self.done, self.number = stream, copy, False, len(stream.events)

    def finish(self) -> None:
        """The copy runs now, whatever its source holds by now."""
        if not self.done:
            self.done = True
            self.copy()

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        if self.number > self.stream.may_wait_through:
            raise AssertionError(
                f"waited for copy {self.number}, allowed up to {self.stream.may_wait_through}"
            )
        self.stream.waits += 1
        self.stream.land(self.number + 1 - self.stream.landed)


class HeldStream:
    """Copies land in order, as on one CUDA stream."""

    def __init__(self) -> None:
        self.events: list[HeldEvent] = []
        self.landed = self.waits = 0
        self.may_wait_through = -1  # number of the last event that may be synchronised

    def after_current(self, copy: Callable[[], None]) -> HeldEvent:
        self.events.append(HeldEvent(self, copy))
        return self.events[-1]

    def land(self, count: int) -> None:
        """The next `count` copies are done."""
        for event in self.events[self.landed : self.landed + count]:
            event.finish()
        self.landed = min(len(self.events), self.landed + max(0, count))

    @property
    def in_flight(self) -> int:
        return len(self.events) - self.landed
