"""The progress bar of a batch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], title: str, enabled: bool) -> Iterable[T]:
    """The items, with a tqdm bar if `enabled` and tqdm is installed."""
    if not enabled or importlib.util.find_spec("tqdm") is None:
        return items
    bar: Iterable[T] = importlib.import_module("tqdm").tqdm(items, desc=title, dynamic_ncols=True)
    return bar
