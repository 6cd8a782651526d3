"""Called by `trtllm_r3.pth` at interpreter start where TRTLLM_R3 or TRTLLM_R3_STANDIN is set.

Processes that never import the engine must not pay for it: all that happens at start is one more finder
on `sys.meta_path`. At the first import of `tensorrt_llm` it takes itself away, puts the stand-in on the
path (TRTLLM_R3_STANDIN), calls `trtllm_r3.enable()` (TRTLLM_R3), and lets the import go on.
Standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

ENGINE = "tensorrt_llm"

errors: list[str] = []
"""What went wrong while arming this process, for `trtllm_r3.status()`."""


def arm() -> None:
    """Make the first import of the engine arm this process, as the environment asks. Never raises."""
    if not _steps() or any(isinstance(finder, _FirstImport) for finder in sys.meta_path):
        return
    if ENGINE in sys.modules:
        _fire()
    else:
        sys.meta_path.insert(0, _FirstImport())


def _steps() -> list[Callable[[], None]]:
    steps: list[Callable[[], None]] = []
    if os.environ.get("TRTLLM_R3_STANDIN"):
        steps.append(_install_stand_in)
    # Whatever is not plainly "off" goes to enable(), which says what is wrong with it.
    if os.environ.get("TRTLLM_R3", "").strip().lower() not in ("", "0", "false", "off", "no"):
        steps.append(_enable)
    return steps


def _install_stand_in() -> None:
    from trtllm_r3 import standin

    standin.install(os.environ["TRTLLM_R3_STANDIN"])


def _enable() -> None:
    import trtllm_r3

    trtllm_r3.enable()


def _fire() -> None:
    for step in _steps():
        try:
            step()
        except Exception as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
    if errors and sys.stderr is not None:
        print(f"trtllm-r3: this process is not armed: {'; '.join(errors)}", file=sys.stderr)


class _FirstImport:
    """A finder that finds nothing; it waits for the engine."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ENGINE and not fullname.startswith(ENGINE + "."):
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _fire()
        # The import system is walking the list that has just changed under it: look afresh.
        from importlib.util import find_spec

        return find_spec(fullname)
