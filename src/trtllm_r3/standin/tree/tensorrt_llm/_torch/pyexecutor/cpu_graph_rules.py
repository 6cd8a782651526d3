"""Which operators a recording keeps, opens or refuses."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_BY_CONTENT = {  # operators whose result has a shape that depends on data
    "nonzero",
    "masked_select",
    "bincount",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
}
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
_UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_OPENED = {"trtllm::moe_custom_op"}  # runs the engine's own Python code: what is inside counts


class GraphCaptureError(RuntimeError):
    """Something in a recording can't be replayed."""


@cache
def is_composite(func: Any) -> bool:
    """Whether an operator of torch only calls others, which are recorded in its place."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return func.namespace == "aten" and has_kernel(func.name(), "CompositeImplicitAutograd")


def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GraphCaptureError for an operator that a graph cannot hold."""
    name, tags = func.overloadpacket.__name__, func.tags
    if torch.Tag.nondeterministic_seeded in tags and "scaled_dot_product" not in name:
        raise refusal(f"{func} (random numbers)")
    if name in _INDEXING:
        masks = [index for index in tensors_in(args[1]) if index.dtype in (torch.bool, torch.uint8)]
        if masks and not ("put" in name and args[2].numel() == 1):
            raise refusal(f"{func} (indexed by a mask)")
        return
    unbound = torch.Tag.dynamic_output_shape in tags and kwargs.get("output_size") is None
    if unbound or name in _BY_CONTENT or torch.Tag.data_dependent_output in tags:
        raise refusal(f"{func} (the host would wait for the contents of a tensor)")


def refusal(what: str) -> GraphCaptureError:
    """The error for something that a graph cannot hold."""
    return GraphCaptureError(f"operation not permitted when the stream is capturing: {what}")


def must_rerun(func: Any, targets: list[torch.Tensor | None]) -> bool:
    """Not for views and for changes of shapes and strides, which the recording has resolved."""
    if func.namespace != "aten":
        return True
    if torch.Tag.inplace_view in func.tags or is_undefined(func):
        return False
    return func._schema.is_mutable or not targets or any(target is not None for target in targets)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested arguments."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_opened(func: Any) -> bool:
    """Whether what runs inside of a custom operator is recorded in its place."""
    return func.name() in _OPENED


def is_undefined(func: Any) -> bool:
    """Whether the content of the result is undefined."""
    return func.namespace == "aten" and func.overloadpacket.__name__ in _UNDEFINED
