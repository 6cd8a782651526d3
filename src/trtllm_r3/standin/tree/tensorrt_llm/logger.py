"""The engine's logger: one object, level from TLLM_LOG_LEVEL (default "error")."""

from __future__ import annotations

import logging
import os
import sys

_SEVERITIES = {
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
}


class Logger:
    """Prints `[time] [TRT-LLM] [level] message` to standard error."""

    ENV_VARIABLE = "TLLM_LOG_LEVEL"
    DEFAULT_LEVEL = "error"

    def __init__(self) -> None:
        self._logger = logging.getLogger("TRT-LLM")
        self._logger.propagate = False
        if not self._logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("[%(asctime)s] [TRT-LLM] [%(levelname).1s] %(message)s"))
            self._logger.addHandler(handler)
        self._rank: int | None = None
        self._seen: set[str] = set()
        self._level = self.DEFAULT_LEVEL
        requested = os.environ.get(self.ENV_VARIABLE, self.DEFAULT_LEVEL).lower()
        self.set_level(requested if requested in _SEVERITIES else self.DEFAULT_LEVEL)

    @property
    def level(self) -> str:
        """Name of the current level."""
        return self._level

    def set_level(self, level: str) -> None:
        """Set the level by name; ValueError for an unknown name."""
        if level not in _SEVERITIES:
            raise ValueError(f"unknown log level {level!r}, use one of {sorted(_SEVERITIES)}")
        self._level = level
        self._logger.setLevel(_SEVERITIES[level])

    def set_rank(self, rank: int) -> None:
        """Prefix every later message with the rank."""
        self._rank = rank

    def log(self, severity: str, *message: object) -> None:
        """Log the parts of `message`, joined by spaces, at the named severity."""
        prefix = "" if self._rank is None else f"[RANK {self._rank}] "
        self._logger.log(_SEVERITIES[severity], "%s", prefix + " ".join(str(part) for part in message))

    def log_once(self, severity: str, *message: object, key: str) -> None:
        """Log only the first message with this key."""
        if key not in self._seen:
            self._seen.add(key)
            self.log(severity, *message)

    def critical(self, *message: object) -> None:
        """Log at "internal_error"."""
        self.log("internal_error", *message)

    def error(self, *message: object) -> None:
        """Log at "error"."""
        self.log("error", *message)

    def warning(self, *message: object) -> None:
        """Log at "warning"."""
        self.log("warning", *message)

    def warning_once(self, *message: object, key: str) -> None:
        """Log at "warning", once for each key."""
        self.log_once("warning", *message, key=key)

    def info(self, *message: object) -> None:
        """Log at "info"."""
        self.log("info", *message)

    def info_once(self, *message: object, key: str) -> None:
        """Log at "info", once for each key."""
        self.log_once("info", *message, key=key)

    def debug(self, *message: object) -> None:
        """Log at "debug"."""
        self.log("debug", *message)


logger = Logger()


def set_level(level: str) -> None:
    """Set the level of the engine's logger."""
    logger.set_level(level)
