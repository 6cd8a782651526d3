"""Helpers of the LLM class."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..sampling_params import SamplingParams


def item_at(options: dict[str, Any], position: int) -> dict[str, Any]:
    """The options of one prompt: of a list its entry, else the one value for all."""
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
