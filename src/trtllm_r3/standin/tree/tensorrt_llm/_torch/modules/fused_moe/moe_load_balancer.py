"""Expert load balancing: more slots than experts, replicas of busy experts, moves between iterations."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ....logger import logger
from ....mapping import Mapping
from .single_layer_load_balancer import SingleLayerMoeLoadBalancer

__all__ = [
    "MoeLoadBalancer",
    "MoeLoadBalancerIterContext",
    "SingleLayerMoeLoadBalancer",
    "get_moe_load_balancer",
    "maybe_create_moe_load_balancer",
]

_active = threading.local()


class MoeLoadBalancer:
    """Load balancer of a model. MoE layers that are built within `with balancer:` take part.

    One process holds all slots. Between two iterations `layer_updates_per_iter` layers, in turn, get another
    placement. ValueError for more than one rank.
    """

    def __init__(
        self,
        ep_rank: int,
        ep_size: int,
        layer_updates_per_iter: int,
        shared_memory_base_name: str = "moe_shared",
    ) -> None:
        if ep_size != 1:
            raise ValueError(f"MoeLoadBalancer: ep_size={ep_size} is not supported, only 1")
        self.ep_rank, self.ep_size = ep_rank, ep_size
        self.layer_updates_per_iter = layer_updates_per_iter
        self.single_layer_load_balancers: list[SingleLayerMoeLoadBalancer] = []
        self.iter_id = 0
        self.in_iter = self.enable_statistic = self.enable_update_weights = False
        self._enabled = torch.zeros(1, dtype=torch.int64)
        self._next_layer = 0
        self._previous: list[MoeLoadBalancer | None] = []

    def is_static_routing(self) -> bool:
        """Whether the experts stay where they are."""
        return self.layer_updates_per_iter == 0

    def add_layer(
        self, expert_count: int, top_k: int, slot_count_per_rank: int, aux_stream: Any = None
    ) -> SingleLayerMoeLoadBalancer:
        """The balancer of one more layer."""
        layer = SingleLayerMoeLoadBalancer(
            expert_count, slot_count_per_rank * self.ep_size, self._enabled, not self.is_static_routing()
        )
        self.single_layer_load_balancers.append(layer)
        return layer

    def set_iter_info(self, enable_statistic: bool | None, enable_update_weights: bool | None) -> None:
        """Whether iterations from now on are counted, and followed by moves; None leaves it as it is."""
        if enable_update_weights is not None:
            self.enable_update_weights = enable_update_weights
        if enable_statistic is not None and enable_statistic != self.enable_statistic:
            self.enable_statistic = enable_statistic
            self._enabled.fill_(int(enable_statistic))

    def start_iter(self) -> None:
        """An iteration begins."""
        assert not self.in_iter, "already in forward"
        self.in_iter = True

    def end_iter(self) -> None:
        """An iteration has been launched: move what is to be moved."""
        assert self.in_iter, "not in forward, cannot end_iter"
        self.in_iter = False
        self.iter_id += 1
        if self.enable_update_weights:
            layers = self.single_layer_load_balancers
            for _ in range(min(self.layer_updates_per_iter, len(layers))):
                layers[self._next_layer].update()
                self._next_layer = (self._next_layer + 1) % len(layers)

    def __enter__(self) -> MoeLoadBalancer:
        self._previous.append(get_moe_load_balancer())
        _active.instance = self
        return self

    def __exit__(self, *exc: object) -> None:
        _active.instance = self._previous.pop()


class MoeLoadBalancerIterContext:
    """One iteration of a dynamic load balancer; nothing for a static one and for None."""

    def __init__(
        self,
        moe_load_balancer: MoeLoadBalancer | None,
        enable_statistic: bool | None = None,
        enable_updates: bool | None = None,
    ) -> None:
        dynamic = moe_load_balancer is not None and not moe_load_balancer.is_static_routing()
        self.moe_load_balancer = moe_load_balancer if dynamic else None
        self.enable_statistic, self.enable_updates = enable_statistic, enable_updates

    def __enter__(self) -> MoeLoadBalancerIterContext:
        if self.moe_load_balancer is not None:
            self.moe_load_balancer.set_iter_info(self.enable_statistic, self.enable_updates)
            self.moe_load_balancer.start_iter()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.moe_load_balancer is not None:
            self.moe_load_balancer.end_iter()


def get_moe_load_balancer() -> MoeLoadBalancer | None:
    """The load balancer within whose `with` this thread is."""
    found: MoeLoadBalancer | None = getattr(_active, "instance", None)
    return found


def maybe_create_moe_load_balancer(
    model_config: Any, mapping: Mapping | None
) -> AbstractContextManager[MoeLoadBalancer | None]:
    """The load balancer that the model's configuration asks for, or a context of None."""
    config = model_config.moe_load_balancer
    if config is None:
        return nullcontext()
    mapping = mapping or Mapping()
    config.setup(ep_rank=mapping.moe_ep_rank, ep_size=mapping.moe_ep_size)
    logger.info(f"MoE load balancer, layer_updates_per_iter={config.layer_updates_per_iter}")
    return MoeLoadBalancer(mapping.moe_ep_rank, mapping.moe_ep_size, config.layer_updates_per_iter)
