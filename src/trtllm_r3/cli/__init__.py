"""The command line: `trtllm-r3 rollout` and `trtllm-r3 demo`."""

from __future__ import annotations

import sys

_NEEDS = ("typer", "rich", "safetensors")


def main() -> None:
    """Entry point of the console script. Exit codes: 0 good, 1 something failed, 2 used the wrong way."""
    try:
        from .app import app
    except ModuleNotFoundError as exc:
        if exc.name not in _NEEDS:
            raise
        print(
            f"trtllm-r3 needs {exc.name}, which the extra 'cli' brings ('standin': the stand-in engine too)",
            file=sys.stderr,
        )
        sys.exit(2)
    app()
