"""Tasks for worker processes; imports the standard library only."""

from __future__ import annotations

import os
import sys
import time


def where_am_i(variable: str) -> tuple[int, list[str], str | None]:
    """Process id, path, and a variable of the environment."""
    return os.getpid(), sys.path, os.environ.get(variable)


def imported(*names: str) -> dict[str, bool]:
    """Which of these modules the process has imported."""
    return {name: name in sys.modules for name in names}


def imported_with(tokenizer: object, name: str) -> bool:
    """Whether the process has imported a module after it received a tokenizer."""
    return name in sys.modules


def fail(error: Exception) -> None:
    """Raise."""
    raise error


def unpicklable() -> object:
    """Return what cannot travel."""
    return lambda: None


def die(code: int) -> None:
    """End the process at once."""
    os._exit(code)


def sleep_for_ever() -> None:
    """Never return."""
    while True:
        time.sleep(1)
