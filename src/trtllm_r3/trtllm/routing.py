"""The hook on each MoE layer: hears what the router chose, and changes nothing.

It sits on instances, not on classes: every routing class overrides `apply` and some call
`super().apply()`, so that a patched class would be heard twice or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..flow.capturer import RouteCapturer
from .runtime import guard
from .sites import Site


def listen(sites: Sequence[Site], engine: Any) -> list[Callable[[], None]]:
    """Hook every site of an engine; returns what takes the hooks off. `engine` has a `.recorder`."""
    undo: list[Callable[[], None]] = []
    for site in sites:
        undo.append(
            _put(site.module, site.entry, _around_layer(site, engine, getattr(site.module, site.entry)))
        )
        balancer: Any = getattr(site.module, "layer_load_balancer", None)
        if balancer is not None and hasattr(balancer, "route"):
            undo.append(_put(balancer, "route", _around_remap(site, engine, balancer.route)))
    for routing in {id(site.routing): site.routing for site in sites}.values():
        undo.append(_put(routing, "apply", _after_routing(engine, routing.apply)))
    return undo


def _put(owner: Any, name: str, hook: Callable[..., Any]) -> Callable[[], None]:
    # Through __dict__, since nn.Module.__setattr__ and __delattr__ look at more than we want.
    owner.__dict__[name] = hook

    def take_off() -> None:
        if owner.__dict__.get(name) is hook:
            del owner.__dict__[name]

    return take_off


def _after_routing(engine: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    capturer: RouteCapturer = engine.recorder.capturer

    def apply(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        logits = args[0] if args else next(iter(kwargs.values()), None)
        # nn.Module.apply(fn) has the same name and another meaning.
        if isinstance(logits, torch.Tensor):
            with guard("routing_method.apply", engine):
                capturer.hear(result[0], logits)
        return result

    return apply


def _around_remap(site: Site, engine: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a load balancer's `route(ids, ...)`, which makes slots of ids: it may reuse their memory.

    While the placement is the identity no value shows that, so the storage is asked.
    """
    capturer: RouteCapturer = engine.recorder.capturer

    def route(ids: Any, *args: Any, **kwargs: Any) -> Any:
        slots = original(ids, *args, **kwargs)
        with guard("load balancer", engine):
            if slots.untyped_storage()._cdata == ids.untyped_storage()._cdata:
                capturer.rewritten(site.ordinal)
        return slots

    return route


def _around_layer(site: Site, engine: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    capturer: RouteCapturer = engine.recorder.capturer

    def run(*args: Any, **kwargs: Any) -> Any:
        with guard("MoE entry", engine):
            logits = kwargs["router_logits"] if "router_logits" in kwargs else args[1]
            capturer.enter(site.ordinal, logits, _local_rows(site.module, logits, kwargs))
        result = original(*args, **kwargs)
        with guard("MoE exit", engine):
            capturer.leave()
        return result

    return run


def _local_rows(module: Any, logits: torch.Tensor, kwargs: dict[str, Any]) -> int:
    """Rows of this rank; under attention DP the tail of the logits may be padding up to the largest rank."""
    ranks = kwargs.get("all_rank_num_tokens")
    if ranks and getattr(module, "use_dp", False):
        return int(min(ranks[module.mapping.tp_rank], logits.shape[0]))
    return int(logits.shape[0])
