"""CUDA graphs on CPU: the operators of a forward, recorded once and replayed without its Python code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .cpu_graph_pool import CpuGraphPool, PoolBlock
from .cpu_graph_rules import (
    GraphCaptureError,
    is_composite,
    is_opened,
    is_undefined,
    must_rerun,
    refusal,
    refuse,
    tensors_in,
)

__all__ = ["CpuGraph", "CpuGraphPool", "GraphCaptureError"]

Step = Callable[[], object]
_HOST_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}


class CpuGraph:
    """A recording. Graphs that share a pool recycle each other's memory: results last until the next replay.

    Only operators are kept: Python code that ran during the recording does not run again. Tensors from
    elsewhere (weights, input buffers) are read and written where they are.
    """

    def __init__(self, pool: CpuGraphPool | None = None) -> None:
        self._pool = pool or CpuGraphPool()
        self._steps: list[Step] = []

    def pool(self) -> CpuGraphPool:
        """The memory, to be shared with further graphs."""
        return self._pool

    def __len__(self) -> int:
        return len(self._steps)

    @contextlib.contextmanager
    def record(self, host_tensors: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Record what runs within. Only `host_tensors` and what is made of them may be read by Python.

        GraphCaptureError for another host read, for a result whose shape depends on data, for random numbers,
        or if the pool is recording already. After an error the graph is empty.
        """
        if self._pool.on_release is not None:
            raise GraphCaptureError("a recording with this memory pool is in progress")
        self._steps = []
        self._pool.on_release = self._log_release
        host = _HostTensors(host_tensors)
        try:
            with _NoHostReads(host), _Recorder(self._pool, self._steps.append, host):
                yield
        except BaseException:
            self._steps = []
            raise
        finally:
            self._pool.on_release = None

    def replay(self) -> None:
        """Run the recorded operators. GraphCaptureError if there is no complete recording."""
        if not self._steps:
            raise GraphCaptureError("nothing was recorded")
        with torch.inference_mode():
            for step in self._steps:
                step()

    def weak(self, output: Any) -> Any:
        """The same structure of tensors over the same memory, which they do not keep from being recycled."""
        return tree_map(self._weak, output)

    def reset(self) -> None:
        """Forget the recording."""
        self._steps = []

    def _weak(self, value: Any) -> Any:
        block = self._pool.block_of(value) if isinstance(value, torch.Tensor) else None
        return value if block is None else block.alias(value)

    def _log_release(self, block: PoolBlock) -> None:
        self._steps.append(block.poison)


class _HostTensors:
    """Tensors of the host in the sense of CUDA: Python may read them while the device is being recorded."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._kept = list(tensors)
        self._storages = {_storage(tensor) for tensor in self._kept}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._storages

    def add(self, value: Any) -> None:
        for tensor in tensors_in(value):
            self._kept.append(tensor)
            self._storages.add(_storage(tensor))


class _NoHostReads(TorchFunctionMode):
    """Refuses the reads that never reach the dispatcher."""

    def __init__(self, host: _HostTensors) -> None:
        super().__init__()
        self._host = host

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HOST_METHODS and args[0] not in self._host:
            raise refusal(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Runs each operator, moves what it made into the pool and logs how to do it again."""

    def __init__(self, pool: CpuGraphPool, log: Callable[[Step], None], host: _HostTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool, self._log, self._host = pool, log, host

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, for seconds, to keep it off code that it never sees

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        if inputs and all(tensor in self._host for tensor in inputs):
            out = func(*args, **kwargs)
            self._host.add(out)
            return out
        if is_opened(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        if is_composite(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if func.namespace == "aten":
            refuse(func, args, kwargs)
        return self._record(func, args, kwargs, inputs)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> Any:
        fixed_args, fixed_kwargs = tree_map(self._fixed, (args, kwargs))
        given = {_storage(tensor) for tensor in inputs}
        targets: list[torch.Tensor | None] = []
        with torch._C.DisableTorchFunction():  # an operator's kernel may read what it likes
            result = func(*args, **kwargs)
        out = tree_map(lambda value: self._place(value, given, targets, not is_undefined(func)), result)
        if must_rerun(func, targets):
            self._log(_step(func, fixed_args, fixed_kwargs, targets))
        return out

    def _fixed(self, value: Any) -> Any:
        """A tensor as the log keeps it: not holding the user's storage if it lies in the pool."""
        block = self._pool.block_of(value) if isinstance(value, torch.Tensor) else None
        return value if block is None else block.alias(value)

    def _place(self, value: Any, given: set[int], targets: list[torch.Tensor | None], copy: bool) -> Any:
        """Move a fresh result into the pool; `targets` gets its place there, or None for other results."""
        fresh = isinstance(value, torch.Tensor) and value.numel() > 0 and _storage(value) not in given
        mine = None
        if fresh:
            value, mine = self._pool.place(value, copy)
        targets.append(mine)
        return value


def _step(func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor | None]) -> Step:
    wanted = [(index, target) for index, target in enumerate(targets) if target is not None]
    if not wanted:
        return partial(func, *args, **kwargs)

    def run_one(copy: Any = wanted[0][1].copy_) -> None:
        copy(func(*args, **kwargs))

    def run_all() -> None:
        results = tree_leaves(func(*args, **kwargs))
        for index, target in wanted:
            target.copy_(results[index])

    single = (
        len(targets) == 1 and len(func._schema.returns) == 1 and "[]" not in str(func._schema.returns[0].type)
    )
    return run_one if single else run_all


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
