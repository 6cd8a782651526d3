"""Everything this package raises.

    R3Error
    +-- ConfigError        (ValueError)    an option or an environment variable has no meaning
    +-- NotReadyError      (RuntimeError)  a hook that capture needs is not in place in this engine
    +-- UnsupportedError   (RuntimeError)  this engine set-up cannot be captured exactly
    +-- RequestRefused     (ValueError)    this one request cannot have routes; the others can
    +-- RoutesMissing      (LookupError)   rows are missing and `on_gap="error"` was chosen
    +-- RoutesMismatch     (ValueError)    arrays of routes that do not fit each other

Each message says what was expected, what was found and what to do.
All of them pickle, since some are raised in a worker process and travel to the caller.
"""

from __future__ import annotations


class R3Error(Exception):
    """Base of all errors of this package."""


class ConfigError(R3Error, ValueError):
    """An option of `enable()` or a `TRTLLM_R3_*` variable has a value that means nothing."""


class NotReadyError(R3Error, RuntimeError):
    """A required hook is not in place, so an engine that wants routes is not built."""


class UnsupportedError(R3Error, RuntimeError):
    """The engine is set up in a way whose routes cannot be captured exactly."""


class RequestRefused(R3Error, ValueError):
    """A single request asks for routes that cannot be given; nothing else is affected."""


class RoutesMissing(R3Error, LookupError):
    """Rows are missing from a result and the user chose `on_gap="error"`."""


class RoutesMismatch(R3Error, ValueError):
    """Two arrays of routes, or routes and tokens, do not fit each other."""


def explain(*, what: str, expected: str, found: str, remedy: str) -> str:
    """Build a message in the one form that all errors here share."""
    return f"{what}: expected {expected}, found {found}. {remedy}".rstrip()
