"""Main program of a pool process: run pickled tasks until told to stop.

The pool runs this file by its path, so that nothing but the standard library is imported before the first
task is unpickled: the task's function comes first in its pickle and decides what is imported first.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any


def _run(task: bytes) -> tuple[bool, Any, str]:
    try:
        function, args, kwargs = pickle.loads(task)
        return True, function(*args, **kwargs), ""
    except Exception as error:
        return False, error, f"in the worker process:\n{traceback.format_exc()}"


def _dump(outcome: tuple[bool, Any, str]) -> bytes:
    """Pickle an outcome; what does not survive pickling becomes a RuntimeError that says so."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
        return data
    except Exception:
        error = RuntimeError(f"outcome of the task cannot be pickled: {outcome[1]!r}")
        return pickle.dumps((False, error, outcome[2]))


def serve(channel: Connection) -> None:
    """Take tasks from `channel`, answer each with (success, outcome, traceback); a hang-up ends it."""
    while True:
        try:
            task = channel.recv_bytes()
        except (EOFError, OSError):
            return
        channel.send_bytes(_dump(_run(task)))


if __name__ == "tensorrt_llm_pool_worker":
    # Ctrl-C goes to the whole process group; the process that owns the pool decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(globals()["pool_channel"])
