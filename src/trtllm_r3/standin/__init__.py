"""A small real engine under TensorRT-LLM's own names, for machines without TensorRT-LLM.

`install()` makes `import tensorrt_llm` find it. It is never used in place of the stock package.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

ERAS = ("1.2",)
"""Releases of TensorRT-LLM whose names and call order the stand-in can take on."""

_ENGINE = "tensorrt_llm"
_TREE = str(Path(__file__).parent / "tree")
_NEEDS = ("torch", "transformers", "tokenizers", "safetensors", "pydantic")
_era: str | None = None


class StandInUnavailable(RuntimeError):
    """The stand-in cannot be used here; the message says why and what to do."""


def install(era: str = "1.2") -> None:
    """Make `import tensorrt_llm` find the stand-in; doing it again is harmless. Raises StandInUnavailable."""
    global _era
    if era not in ERAS:
        raise StandInUnavailable(f"no stand-in for era {era!r}; there are: {', '.join(ERAS)}")
    if installed() not in (None, era):
        raise StandInUnavailable(f"expected era {era!r}, found {installed()!r} installed: one to a process")
    _refuse_stock()
    lacking = [name for name in _NEEDS if find_spec(name) is None]
    if lacking:
        raise StandInUnavailable(f'{", ".join(lacking)} not installed: pip install "trtllm-r3[standin]"')
    if _TREE not in sys.path:
        sys.path.append(_TREE)
        importlib.invalidate_caches()
    _era = era


def installed() -> str | None:
    """Era of the stand-in in this process, or None. A spawned worker inherits it through `sys.path`."""
    return (_era or ERAS[0]) if _TREE in sys.path else None


def uninstall() -> None:
    """Take the stand-in off the path and its modules out of `sys.modules` (for tests)."""
    global _era
    _era = None
    while _TREE in sys.path:
        sys.path.remove(_TREE)
    for name in [n for n in sys.modules if n == _ENGINE or n.startswith(_ENGINE + ".")]:
        if _is_ours(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]
    importlib.invalidate_caches()


def _refuse_stock() -> None:
    loaded = sys.modules.get(_ENGINE)
    if loaded is not None:
        origin, how = getattr(loaded, "__file__", None), "already imported"
    else:
        spec = find_spec(_ENGINE)
        if spec is None or spec.origin is None:  # an empty folder of that name is not the engine
            return
        origin, how = spec.origin, "installed"
    if not _is_ours(origin):
        raise StandInUnavailable(
            f"expected no {_ENGINE} beside the stand-in, found it {how} from {origin}: "
            "use that one, or leave it out of this environment"
        )


def _is_ours(origin: str | None) -> bool:
    return origin is not None and origin.startswith(_TREE)
