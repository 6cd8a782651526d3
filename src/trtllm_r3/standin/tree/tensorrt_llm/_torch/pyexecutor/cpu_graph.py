"""Graphs on CPU with the rules of CUDA graphs.

A recording keeps the operators that ran, with fixed memory, and a replay runs only these: nothing of Python
around them. The memory comes from a pool. What nobody refers to any more is overwritten at once and given
to a later operator, of the same graph or of another one of the pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .cpu_graph_pool import CpuGraphPool, storage_key

__all__ = ["CpuGraph", "CpuGraphPool"]

_UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_OPENED = {"trtllm::moe_custom_op"}
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
_CONTENT_SHAPED = {"nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_dim"} | {
    "unique_consecutive",
    "unique_dim_consecutive",
}
_HOST_METHODS = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}


_Step = tuple[Callable[..., Any], Sequence[Any], dict[str, Any], Any]


class CpuGraph:
    """One recording, used like `torch.cuda.CUDAGraph`: `with graph.capture(): ...`, then `replay()`.

    The operators also run while they are recorded. Tensors from outside are referred to, so their contents
    at the time of the replay count. RuntimeError where the code reads tensor contents on the host, makes a
    result whose shape depends on them, or draws random numbers.
    """

    def __init__(self, pool: CpuGraphPool | None = None) -> None:
        self._pool = pool or CpuGraphPool()
        self._steps: list[_Step] | None = None

    def pool(self) -> CpuGraphPool:
        """The pool, to be shared with other graphs."""
        return self._pool

    @contextlib.contextmanager
    def capture(self) -> Iterator[CpuGraph]:
        """Record what this thread runs within. RuntimeError if there is a recording already."""
        if self._steps is not None:
            raise RuntimeError("the graph holds a recording: reset() it first")
        recorder = _Recorder(self._pool)
        with _HostMethods(), recorder:
            yield self
        self._steps = recorder.steps
        self._pool.release()

    def replay(self) -> None:
        """Run the recorded operators again. RuntimeError if there is no recording."""
        if self._steps is None:
            raise RuntimeError("the graph holds no recording")
        with torch.inference_mode():
            for func, args, kwargs, kept in self._steps:
                result = func(*args, **kwargs)
                if kept is None:
                    continue
                if isinstance(kept, torch.Tensor):
                    kept.copy_(result)
                else:
                    _copy_leaves(kept, result)

    def reset(self) -> None:
        """Forget the recording."""
        self._steps = None


class _HostMethods(TorchFunctionMode):
    """Refuses methods that read a tensor on the host without an operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HOST_METHODS:
            raise _not_permitted(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Runs operators, moves what they return into the pool and logs them."""

    def __init__(self, pool: CpuGraphPool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self._pool = pool

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.name() in _OPENED:
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace == "aten":
            _refuse(func, args, kwargs)
        self._pool.release()
        return self._record(func, args, kwargs)

    def _record(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        logged_args, logged_kwargs = pytree.tree_map_only(torch.Tensor, self._logged, (args, kwargs))
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        known = {
            storage_key(one) for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)
        }
        leaves, spec = pytree.tree_flatten(result)
        fresh = [_is_fresh(leaf, known) for leaf in leaves]
        undefined = func.namespace == "aten" and func.overloadpacket.__name__ in _UNDEFINED
        placed = self._place(leaves, fresh, copy=not undefined)
        if not undefined and _must_rerun(func, any(fresh), bool(leaves)):
            kept = [self._logged(leaf) if new else None for leaf, new in zip(placed, fresh, strict=True)]
            target = None if not any(fresh) else kept[0] if isinstance(result, torch.Tensor) else kept
            self.steps.append((func, logged_args, logged_kwargs, target))
        return pytree.tree_unflatten(placed, spec)

    def _place(self, leaves: list[Any], fresh: list[bool], copy: bool) -> list[Any]:
        """The leaves, fresh tensors among them moved into the pool with all that they share."""
        storages: dict[int, torch.UntypedStorage] = {}
        placed = []
        for leaf, new in zip(leaves, fresh, strict=True):
            if new:
                source = leaf.contiguous() if torch._debug_has_internal_overlap(leaf) == 1 else leaf
                origin = source.untyped_storage()
                if origin._cdata not in storages:
                    storages[origin._cdata] = self._pool.allocate(origin.nbytes(), self)
                moved = _over(storages[origin._cdata], source)
                placed.append(moved.copy_(source) if copy else moved)
            else:
                placed.append(leaf)
        return placed

    def _logged(self, tensor: torch.Tensor) -> torch.Tensor:
        """How the log refers to a tensor: what came up in this recording is not kept alive by it."""
        block = self._pool.block_of(tensor, self)
        return tensor if block is None else _over(block.storage, tensor)


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor laid out as `like` in another storage."""
    out = torch.empty(0, dtype=like.dtype)
    return out.set_(storage, like.storage_offset(), like.size(), like.stride())


def _copy_leaves(kept: list[torch.Tensor | None], result: Any) -> None:
    for target, leaf in zip(kept, pytree.tree_leaves(result), strict=True):
        if target is not None:
            target.copy_(leaf)


def _is_fresh(leaf: Any, known: set[int]) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.device.type == "cpu"
        and leaf.numel() > 0
        and storage_key(leaf) not in known
    )


def _must_rerun(func: Any, any_fresh: bool, returns: bool) -> bool:
    """Not for views and for changes of shapes and strides, which a recording has resolved."""
    if func.namespace != "aten":
        return True
    if torch.Tag.inplace_view in func.tags:
        return False
    return any_fresh or func._schema.is_mutable or not returns


@cache
def _is_composite(func: Any) -> bool:
    name = func.name()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return func.namespace == "aten" and has_kernel(name, "CompositeImplicitAutograd")


def _refuse(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """RuntimeError for what a graph cannot hold."""
    name, tags = func.overloadpacket.__name__, func.tags
    if torch.Tag.nondeterministic_seeded in tags and "scaled_dot_product" not in name:
        raise _not_permitted(f"{func} (random numbers)")
    if name in _INDEXING:
        masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
        if masks and not ("put" in name and args[2].numel() == 1):
            raise _not_permitted(f"{func} (indexed by a mask)")
        return
    by_contents = torch.Tag.dynamic_output_shape in tags and kwargs.get("output_size") is None
    if by_contents or name in _CONTENT_SHAPED or torch.Tag.data_dependent_output in tags:
        raise _not_permitted(f"{func} (needs the contents of a tensor on the host)")


def _not_permitted(what: str) -> RuntimeError:
    return RuntimeError(f"operation not permitted when the stream is capturing: {what}")
