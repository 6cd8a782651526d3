"""Sessions that run tasks in worker processes."""

from __future__ import annotations

import abc
import multiprocessing
import pickle
import queue
import runpy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .._utils import global_mpi_size, mpi_world_size
from ..logger import logger

_WORKER_FILE = str(Path(__file__).with_name("_pool_worker.py"))
_WORKER_NAME = "tensorrt_llm_pool_worker"


def external_mpi_comm_available(model_world_size: int) -> bool:
    """Whether the ranks were started from outside (mpirun); there is one rank here, so no."""
    return (
        mpi_world_size() == model_world_size and model_world_size > 1
    ) or global_mpi_size() > mpi_world_size()


def need_spawn_mpi_workers(model_world_size: int) -> bool:
    """Whether a model of several ranks needs processes of its own."""
    return mpi_world_size() == 1 and model_world_size > 1


class MpiSession(abc.ABC):
    """Runs a task in every worker."""

    @abc.abstractmethod
    def submit(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Start the task in every worker; one future each."""

    @abc.abstractmethod
    def submit_sync(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run the task in every worker; the results."""

    @abc.abstractmethod
    def shutdown(self, wait: bool = True) -> None:
        """Let the workers end after their current task."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Kill the workers."""

    def shutdown_abort(self, grace: float = 60, reason: object = None) -> None:
        """Shut down; kill the workers if that takes longer than `grace` seconds."""
        if sys.is_finalizing():
            self.shutdown(wait=False)
            return
        killer = threading.Timer(grace, self._abort_late, args=(reason,))
        killer.daemon = True
        killer.start()
        self.shutdown()
        killer.cancel()

    def _abort_late(self, reason: object) -> None:
        logger.critical(f"session does not shut down, killing its workers (reason: {reason!r})")
        self.abort()


class _SpawnedWorker:
    """One spawned interpreter and the thread that feeds it tasks, one after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, remote = context.Pipe()
        self._tasks: queue.Queue[tuple[bytes, Future[Any]] | None] = queue.Queue()
        self.process = context.Process(
            target=runpy.run_path,
            name=_WORKER_NAME,
            daemon=True,
            args=(_WORKER_FILE, {"pool_channel": remote}, _WORKER_NAME),
        )
        self.process.start()
        remote.close()
        self._feeder = threading.Thread(target=self._feed, name="mpi_pool_feeder", daemon=True)
        self._feeder.start()

    def submit(self, task: bytes) -> Future[Any]:
        """Queue a pickled (function, args, kwargs)."""
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        return future

    def stop(self, wait: bool) -> None:
        """End after the queued tasks."""
        self._tasks.put(None)
        if wait:
            self._feeder.join()
            self.process.join()

    def _feed(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                _resolve(self._channel, task, future)
            except (EOFError, OSError):
                self.process.join(5)
                future.set_exception(
                    BrokenExecutor(
                        f"worker process {self.process.pid} died, exit code {self.process.exitcode}"
                    )
                )
        self._channel.close()


def _resolve(channel: Connection, task: bytes, future: Future[Any]) -> None:
    channel.send_bytes(task)
    answer = channel.recv_bytes()
    try:
        success, value, trace = pickle.loads(answer)
    except Exception as error:
        success, value, trace = False, error, "the worker's answer cannot be unpickled"
    if success:
        future.set_result(value)
    else:
        value.__cause__ = RuntimeError(trace)
        future.set_exception(value)


class MpiPoolSession(MpiSession):
    """A pool of spawned interpreters, started by the first task with this environment and `sys.path`.

    Tasks are pickled by reference, the function first. As with every spawn, a script must guard its entry
    with `if __name__ == "__main__"`.
    """

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers
        self.mpi_pool: list[_SpawnedWorker] | None = None

    def submit(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Start the task in every worker; one future each."""
        data = pickle.dumps((task, args, kwargs))
        if self.mpi_pool is None:
            self._start_mpi_pool()
        return [worker.submit(data) for worker in self.mpi_pool or []]

    def submit_sync(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run the task in every worker; the results."""
        return [future.result() for future in self.submit(task, *args, **kwargs)]

    def shutdown(self, wait: bool = True) -> None:
        """Let the workers end after their current task."""
        for worker in self.mpi_pool or []:
            worker.stop(wait)
        self.mpi_pool = None

    def abort(self) -> None:
        """Kill the workers; their futures fail."""
        for worker in self.mpi_pool or []:
            worker.process.kill()

    def _start_mpi_pool(self) -> None:
        self.mpi_pool = [_SpawnedWorker() for _ in range(self.n_workers)]

    def __del__(self) -> None:
        self.shutdown(wait=False)

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle MPI session")
