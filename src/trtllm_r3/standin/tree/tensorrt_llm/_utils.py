"""Ranks, names of dtypes and small helpers shared by the whole engine."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from typing import TypeVar

import torch

T = TypeVar("T")

_STR_TO_TORCH = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_TORCH_TO_STR = {dtype: name for name, dtype in _STR_TO_TORCH.items()}


def str_dtype_to_torch(dtype: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"; ValueError for an unknown name."""
    if dtype not in _STR_TO_TORCH:
        raise ValueError(f"unsupported dtype {dtype!r}, use one of {sorted(_STR_TO_TORCH)}")
    return _STR_TO_TORCH[dtype]


def torch_dtype_to_str(dtype: torch.dtype) -> str:
    """The name of a torch dtype; ValueError where it has none here."""
    if dtype not in _TORCH_TO_STR:
        raise ValueError(f"unsupported dtype {dtype}")
    return _TORCH_TO_STR[dtype]


class _SoleRank:
    """The communicator of an engine that has exactly one rank."""

    def Get_rank(self) -> int:
        """Always 0."""
        return 0

    def Get_size(self) -> int:
        """Always 1."""
        return 1

    def barrier(self) -> None:
        """Return at once: nobody else has to arrive."""

    def allgather(self, value: T) -> list[T]:
        """The values of all ranks: the own one."""
        return [value]


_COMM = _SoleRank()


def mpi_comm() -> _SoleRank:
    """The communicator of this engine's ranks."""
    return _COMM


def mpi_rank() -> int:
    """Rank of this process among the engine's ranks."""
    return _COMM.Get_rank()


def mpi_world_size() -> int:
    """Number of the engine's ranks."""
    return _COMM.Get_size()


def global_mpi_rank() -> int:
    """Rank among all processes of the launch."""
    return _COMM.Get_rank()


def global_mpi_size() -> int:
    """Number of all processes of the launch."""
    return _COMM.Get_size()


def mpi_barrier() -> None:
    """Wait for all ranks."""
    _COMM.barrier()


def mpi_disabled() -> bool:
    """Whether TLLM_DISABLE_MPI=1 asks for another orchestrator than the default."""
    return os.environ.get("TLLM_DISABLE_MPI") == "1"


def steady_clock_now() -> float:
    """Seconds on the clock that all times of a request are measured with."""
    return time.monotonic()


@contextlib.contextmanager
def nvtx_range(
    message: str,
    color: str = "grey",
    domain: str = "TensorRT-LLM",
    category: str | None = None,
) -> Iterator[None]:
    """Mark a named range on the CUDA profiler's time line; does nothing without CUDA."""
    del color, domain, category
    marked = torch.cuda.is_available()
    if marked:
        torch.cuda.nvtx.range_push(message)
    try:
        yield
    finally:
        if marked:
            torch.cuda.nvtx.range_pop()


@contextlib.contextmanager
def nvtx_range_debug(
    message: str,
    color: str = "grey",
    domain: str = "TensorRT-LLM",
    category: str | None = None,
) -> Iterator[None]:
    """As `nvtx_range`, but only if TLLM_NVTX_DEBUG=1."""
    if os.environ.get("TLLM_NVTX_DEBUG") != "1":
        yield
        return
    with nvtx_range(message, color, domain, category):
        yield


@contextlib.contextmanager
def customized_gc_thresholds(gen0_threshold: int | None) -> Iterator[None]:
    """Use another threshold of the youngest garbage generation inside the block; None changes nothing."""
    if not gen0_threshold:
        yield
        return
    old = gc.get_threshold()
    gc.set_threshold(gen0_threshold, old[1], old[2])
    try:
        yield
    finally:
        gc.set_threshold(*old)
