"""State of this process: the options in force, the hooks in place, the engines that capture, the faults."""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..plugins import manager
from .native import Native, detect
from .patching import Patcher
from .targets import TARGETS

if TYPE_CHECKING:
    from .engine import CapturedEngine

log = logging.getLogger("trtllm_r3")
_FAULTS_KEPT = 50


class Runtime:
    """One a process; see `runtime()`."""

    def __init__(self) -> None:
        self.config = Config()
        self.active = False
        self.weight_version = 0
        self.engines: weakref.WeakSet[CapturedEngine] = weakref.WeakSet()
        self.faults: list[str] = []
        self._logged: set[str] = set()
        self._workers: dict[str, tuple[float, Mapping[str, int]]] = {}
        self._patcher: Patcher | None = None
        self._lock = threading.RLock()

    @property
    def patcher(self) -> Patcher:
        """Owns every patch of this process; made at the first use, since plug-ins may add rows."""
        if self._patcher is None:
            extra = [row for rows in manager().hook.trtllm_r3_targets() for row in rows]
            self._patcher = Patcher([*TARGETS, *extra])
        return self._patcher

    def enable(self, config: Config) -> None:
        """Take the options and put the hooks in place, unless the engine's own feature is left in charge."""
        with self._lock:
            self.config, self.active = config, True
            native = detect()
            if native is Native.PRESENT and config.native == "defer":
                log.warning(
                    "this TensorRT-LLM returns routed experts by itself; native='defer' leaves it alone"
                )
                self.patcher.revert()
                return
            self.patcher.apply()

    def disable(self) -> None:
        """Undo `enable`."""
        with self._lock:
            self.active = False
            for engine in list(self.engines):
                engine.detach()
            if self._patcher is not None:
                self._patcher.revert()

    def reset(self) -> int:
        """A new weight version in this process, and in each worker with its next request."""
        return self.reach(self.weight_version + 1)

    def reach(self, version: int) -> int:
        """Adopt a weight version that another process announced, if it is newer."""
        with self._lock:
            if version > self.weight_version:
                self.weight_version = version
                for engine in list(self.engines):
                    engine.recorder.epoch = version
            return self.weight_version

    def fault(self, place: str, exc: BaseException) -> None:
        """Keep what went wrong in a hook; log the first of each place with its traceback."""
        self.faults.append(f"{place}: {type(exc).__name__}: {exc}")
        del self.faults[:-_FAULTS_KEPT]
        if place not in self._logged:
            self._logged.add(place)
            log.error("fault in hook %s\n%s", place, "".join(traceback.format_exception(exc)))

    def heard_from(self, worker: str, counters: Mapping[str, int]) -> None:
        """A response brought the counters of its worker."""
        self._workers[worker] = (time.monotonic(), counters)

    def status(self) -> dict[str, Any]:
        """See `trtllm_r3.status`."""
        now = time.monotonic()
        return {
            "enabled": self.active,
            "config": self.config.to_dict(),
            "native": detect().value,
            "weight_version": self.weight_version,
            "patches": self.patcher.report() if self.active or self._patcher else [],
            "engines": [engine.status() for engine in list(self.engines)],
            "workers": {
                name: {"age_s": round(now - at, 3), **counters}
                for name, (at, counters) in self._workers.items()
            },
            "faults": list(self.faults),
        }


@functools.cache
def runtime() -> Runtime:
    """The state of this process."""
    return Runtime()


class guard:
    """Everything in this block may fail without the engine noticing; the fault is kept.

    `engine`: capture of this engine stops with the fault. Without it, only the request at hand suffers.
    """

    def __init__(self, place: str, engine: CapturedEngine | None = None) -> None:
        self.place, self.engine = place, engine

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(exc, Exception):
            return False
        runtime().fault(self.place, exc)
        if self.engine is not None:
            self.engine.recorder.fail(f"{self.place}: {type(exc).__name__}: {exc}")
        return True
