"""Why a row is missing."""

from __future__ import annotations

from enum import IntEnum


class Cause(IntEnum):
    """State of one stored row: CAPTURED, or the reason why its ids are not known.

    The names, in lower case, are what users see in `Routes.gaps`.
    """

    ABSENT = 0  # no step that was recorded has computed this position
    CAPTURED = 1
    NOT_CAPTURED = 2  # at least one layer did not report ids in that forward
    OUT_OF_RANGE = 3  # a layer reported an id outside [0, num_experts)
    CHANGED = 4  # a layer's ids were written to after routing
    PREFIX = 5  # taken from the KV cache, and the rows of what it holds are not known
    LAYOUT = 6  # the engine fed other rows than the schedule says
    POSITION = 7  # rows of the request are not consecutive
    STAGING = 8  # every staging slot was still on its way to the host
    BUFFER = 9  # the forward had more rows than the buffer
    FAULT = 10  # a hook failed; see status()
    KV_RECOMPUTED = 11  # taken from a KV block of which nobody can prove who computed it

    @property
    def label(self) -> str:
        """The name that users see, e.g. "not captured"."""
        return self.name.lower().replace("_", " ")


# Marks on the device, written as K times the same id. The value tells which cause.
DEVICE_CAUSES = (Cause.NOT_CAPTURED, Cause.OUT_OF_RANGE, Cause.CHANGED)
