"""Helpers of the LLM class."""

from __future__ import annotations

import atexit
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..logger import logger
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Self


class ClosedAtExit:
    """Is shut down at the end of a `with` block, when it is dropped, and at the latest when Python exits."""

    def shutdown(self) -> None:
        """Let go of everything."""

    def _close_at_exit(self) -> None:
        atexit.register(ClosedAtExit._shutdown_wrapper, weakref.ref(self))

    @staticmethod
    def _shutdown_wrapper(reference: weakref.ref[ClosedAtExit]) -> None:
        llm = reference()
        if llm is not None:
            llm.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None:
        self.shutdown()

    def __getstate__(self) -> Any:
        raise RuntimeError("LLM object can not be pickled.")

    def __del__(self) -> None:
        try:
            self.shutdown()
        except Exception as error:
            logger.error(f"while the LLM was shut down: {error!r}")


def item_at(options: dict[str, Any], position: int) -> dict[str, Any]:
    """The options of one prompt: of a list its entry (ValueError if it is too short), else the one value."""
    short = [name for name, value in options.items() if isinstance(value, list) and len(value) <= position]
    if short:
        raise ValueError(f"{short[0]} has {len(options[short[0]])} entries, fewer than there are prompts")
    return {name: value[position] if isinstance(value, list) else value for name, value in options.items()}


def needs_words(params: SamplingParams) -> bool:
    """Whether stop or bad strings are given that are not encoded yet."""
    return (params.stop is not None and params._stop_word_ids is None) or (
        params.bad is not None and params._bad_word_ids is None
    )


def load_json(directory: Path | None, name: str) -> SimpleNamespace | None:
    """The values of a JSON file as attributes, or None if there is no such file."""
    if directory is None or not (directory / name).is_file():
        return None
    return SimpleNamespace(**json.loads((directory / name).read_text(encoding="utf-8")))
