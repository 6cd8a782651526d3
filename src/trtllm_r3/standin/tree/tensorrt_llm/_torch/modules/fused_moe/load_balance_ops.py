"""Operators of the expert load balancer: which slot a row's expert is taken from, and how often experts are.

Shapes: ids `[rows, k]`, `slots` `[experts, most replicas]` and `replicas` `[experts]` int32; no value is
waited for, so that a graph can hold them and sees tables that are rewritten between its replays.
"""

from __future__ import annotations

import torch

from ...op_library import register_op


def routing(ids: torch.Tensor, slots: torch.Tensor, replicas: torch.Tensor) -> torch.Tensor:
    """The slot of each id, as `ids`; neighbouring rows take different replicas of an expert."""
    chosen = ids.long()
    rows = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
    return slots[chosen, rows % replicas[chosen]].to(ids.dtype)


def routing_(ids: torch.Tensor, slots: torch.Tensor, replicas: torch.Tensor) -> None:
    """As `routing`, but the slots replace the ids."""
    ids.copy_(routing(ids, slots, replicas))


def statistic(counts: torch.Tensor, ids: torch.Tensor, enabled: torch.Tensor) -> None:
    """Add to `counts` int64 `[experts]` how often each is in `ids`, times `enabled` int64 `[1]`."""
    counts.scatter_add_(0, ids.flatten().long(), enabled.expand(ids.numel()))


register_op(
    "standin::load_balance_routing(Tensor ids, Tensor slots, Tensor replicas) -> Tensor",
    routing,
    lambda ids, slots, replicas: torch.empty_like(ids),
)
register_op(
    "standin::load_balance_routing_(Tensor(a!) ids, Tensor slots, Tensor replicas) -> ()",
    routing_,
    lambda ids, slots, replicas: None,
)
register_op(
    "standin::load_balance_statistic(Tensor(a!) counts, Tensor ids, Tensor enabled) -> ()",
    statistic,
    lambda counts, ids, enabled: None,
)
