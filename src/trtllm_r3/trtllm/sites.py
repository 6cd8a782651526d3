"""The MoE layers of a built model: which ones there are, and whether their routing can be heard."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError, explain
from ..plugins import manager

_INDEX = re.compile(r"(?:^|\.)(?:layers|block|blocks|h)\.(\d+)(?:\.|$)")
_DRAFT = re.compile(r"(?:^|\.)(?:mtp|draft|eagle|medusa)", re.IGNORECASE)

# Backends whose path after `routing_method.apply` does not write to the ids it returned, as read in the
# source of the release named. Layers of any other class are captured one by one.
IDS_LEFT_ALONE = {
    "ConfigurableMoE": "1.2 modules/fused_moe/configurable_moe.py@04c2347b",
    "CutlassFusedMoE": "1.2 modules/fused_moe/fused_moe_cutlass.py@7b437aaa",
    "VanillaMoE": "1.2 modules/fused_moe/fused_moe_vanilla.py@2a9abd95",
}
_REMEDY = (
    'Choose another backend with moe_config=MoeConfig(backend="CUTLASS"), or build the LLM without routes.'
)


@dataclass(frozen=True, eq=False)
class Site:
    """A MoE module whose router we want to hear. `ordinal`: its place on the L axis of the routes."""

    ordinal: int
    layer_id: int
    name: str
    module: Any

    @property
    def routing(self) -> Any:
        """The routing method object; models build one for each layer."""
        return self.module.routing_method

    @property
    def entry(self) -> str:
        """The method through which every run of the layer goes."""
        return "forward_impl" if hasattr(self.module, "forward_impl") else "forward"

    @property
    def top_k(self) -> int:
        """Experts a token."""
        return int(self.routing.experts_per_token)

    @property
    def num_experts(self) -> int:
        """Routed experts, shared ones not counted."""
        return int(self.module.num_experts)

    @property
    def by_layer(self) -> bool:
        """Whether nobody has checked that the ids stay as they were routed."""
        return type(self.module).__name__ not in IDS_LEFT_ALONE


def find_sites(model: Any) -> list[Site]:
    """MoE layers of the decoder in order of their index; draft and MTP layers are left out.

    Raises UnsupportedError for a layer whose index cannot be told, or layers that differ in K or E.
    """
    limit = getattr(_pretrained(model), "num_hidden_layers", None)
    found: dict[int, tuple[str, Any]] = {}
    for name, module in _candidates(model):
        index = _layer_index(name, module)
        if _DRAFT.search(name) or (limit is not None and index >= limit):
            continue
        if index in found:
            twin = f"decoder layer {index} already has the MoE {found[index][0]}"
            raise _refuse(name, module, twin, "one MoE a layer")
        found[index] = (name, module)
    sites = [Site(i, index, *found[index]) for i, index in enumerate(sorted(found))]
    _check_alike(sites)
    return sites


def check_sites(sites: list[Site], *, separate: bool) -> None:
    """Refuse layers that route inside a kernel; with `separate`, make them route outside where they can."""
    if os.environ.get("ENABLE_PERFECT_ROUTER") == "1":
        raise UnsupportedError(
            explain(
                what="ENABLE_PERFECT_ROUTER",
                expected="unset",
                found="1: the engine replaces the router's logits",
                remedy="Unset it.",
            )
        )
    for site in sites:
        reason = verdict(site)
        if reason and separate and _separate(site):
            reason = verdict(site)
        if reason:
            remedy = _REMEDY if separate else f"{_REMEDY} enable(fused='separate') may also help."
            raise _refuse(site.name, site.module, reason, "routing by routing_method.apply", remedy)


def verdict(site: Site) -> str:
    """Empty if the layer is expected to call `routing_method.apply`, else why it will not."""
    opinion: str | None = manager().hook.trtllm_r3_site_verdict(site=site)
    if opinion is not None:
        return opinion
    kind, module = type(site.module).__name__, site.module
    if kind == "TritonFusedMoE":
        return "Triton kernels with a router of their own"
    backend = getattr(module, "backend", None)
    if kind == "ConfigurableMoE" and backend is not None:
        routes_outside = backend._supports_load_balancer() or getattr(module, "comm", None) is not None
        return "" if routes_outside else f"a {type(backend).__name__}, which routes inside its kernel"
    if kind.startswith("TRTLLMGen") and not (
        getattr(module, "use_dp", False) and getattr(module, "parallel_size", 1) > 1
    ):
        return "a backend that routes inside its kernel"
    return ""


def _separate(site: Site) -> bool:
    # The engine asks its backend this question both to call apply and to withhold the logits from the
    # kernel; attention DP answers yes with the same kernels, so they take the ids that we see.
    backend = getattr(site.module, "backend", None)
    if backend is None or not hasattr(backend, "_supports_load_balancer"):
        return False
    backend._supports_load_balancer = lambda: True
    return True


def _candidates(model: Any) -> Iterator[tuple[str, Any]]:
    inner: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inner or getattr(module, "routing_method", None) is None:
            continue
        vanilla = any(cls.__name__ == "VanillaMoE" for cls in type(module).__mro__)
        if not vanilla and not hasattr(module, "forward_impl"):
            continue  # a gate, which only carries the routing method
        inner.update(id(child) for child in module.modules())
        yield name, module


def _layer_index(name: str, module: Any) -> int:
    path, own = _INDEX.search(name), getattr(module, "layer_idx", None)
    if path is None and own is None:
        raise _refuse(name, module, "neither its path nor layer_idx", "a decoder layer index")
    if path is not None and own is not None and int(path[1]) != int(own):
        raise _refuse(name, module, f"path says {path[1]}, layer_idx {own}", "one decoder layer index")
    return int(path[1] if path is not None else own)  # type: ignore[arg-type]  # one of the two is there


def _check_alike(sites: list[Site]) -> None:
    for site in sites:
        mine, first = (site.top_k, site.num_experts), (sites[0].top_k, sites[0].num_experts)
        if mine != first:
            raise _refuse(
                site.name, site.module, f"top_k, experts = {mine}", f"{first} as in {sites[0].name}"
            )


def _pretrained(model: Any) -> Any:
    return getattr(getattr(model, "model_config", None), "pretrained_config", None)


def _refuse(name: str, module: Any, found: str, expected: str, remedy: str = _REMEDY) -> UnsupportedError:
    what = f"MoE layer {name} ({type(module).__name__})"
    return UnsupportedError(explain(what=what, expected=expected, found=found, remedy=remedy))
