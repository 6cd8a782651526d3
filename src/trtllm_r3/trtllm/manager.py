"""RouteManager: tells the recorder when the engine lets go of a request."""

from __future__ import annotations

from typing import Any

from .engine import ATTRIBUTE, CapturedEngine
from .runtime import guard

KEY = "trtllm_r3"


def route_manager(base: type[Any], engine: CapturedEngine) -> Any:
    """An instance of the engine's own BaseResourceManager, made here since it cannot be imported earlier."""

    class RouteManager(base):  # type: ignore[misc]  # known at run time only
        """Holds no memory of the engine; appended last, so that it is asked first when a request is freed."""

        def get_max_resource_count(self) -> int:
            """Never the resource that limits a schedule."""
            return 1 << 30

        def get_needed_resource_to_completion(self, request: Any) -> int:
            """A request needs nothing of it."""
            return 0

        def free_resources(self, request: Any) -> None:
            """Called on finish, error and cancel, but also on a pause; sometimes twice."""
            with guard("free_resources"):
                _let_go(engine, request)

    return RouteManager()


def _let_go(engine: CapturedEngine, request: Any) -> None:
    track = engine.track_of(request)
    if track is None:
        return
    tokens = request.get_tokens(0) if track.lease is not None else ()
    if request.is_finished:
        engine.recorder.release(track, tokens)
        delattr(request, ATTRIBUTE)
    else:
        engine.recorder.pause(track, tokens)
