"""Operators of the engine in torch's registry, which outlives the modules that define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_REGISTRY = "_tensorrt_llm_operators"


def register_op(schema: str, function: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """Register `function` as the operator of `schema` ("namespace::name(...) -> ...") on CPU and CUDA.

    `meta` makes results of the right shape alone. An operator that an earlier import registered is replaced.
    """
    namespace, _, signature = schema.partition("::")
    name = schema.partition("(")[0]
    # kept on torch, where a second import of this module finds it
    known: dict[str, torch.library.Library] = torch.library.__dict__.setdefault(_REGISTRY, {})
    if name in known:
        known.pop(name)._destroy()
    library = known[name] = torch.library.Library(namespace, "FRAGMENT")
    library.define(signature)
    for key, implementation in (("CPU", function), ("CUDA", function), ("Meta", meta)):
        library.impl(signature.partition("(")[0], implementation, key)
