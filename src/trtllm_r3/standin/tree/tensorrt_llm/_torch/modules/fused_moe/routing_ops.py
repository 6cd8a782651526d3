"""Routing as pure functions of logits, and the operators of the `trtllm` namespace that compute it.

The routing methods call the operators; the fused backend calls the functions inside its own.
"""

from __future__ import annotations

import torch

from ...op_library import register_op

Routed = tuple[torch.Tensor, torch.Tensor]


def default_routing(router_logits: torch.Tensor, top_k: int, output_dtype: torch.dtype) -> Routed:
    """(scales, ids int32) of the `top_k` largest of softmax(logits) `[rows, E]`, each `[rows, top_k]`."""
    values, ids = torch.topk(torch.softmax(router_logits, -1, dtype=output_dtype), top_k, -1)
    return values, ids.to(torch.int32)


def renorm_routing(router_logits: torch.Tensor, top_k: int, output_dtype: torch.dtype) -> Routed:
    """(scales, ids int32): the `top_k` largest logits and the softmax over these alone."""
    values, ids = torch.topk(router_logits, top_k, -1)
    return torch.softmax(values, -1, dtype=output_dtype), ids.to(torch.int32)


def noaux_tc(
    router_logits: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    routed_scaling_factor: float,
) -> Routed:
    """(scales, ids int32) of DeepSeek-V3: sigmoid scores, chosen with `bias` among the best groups.

    A group is worth the sum of its two best biased scores; scales are unbiased scores that sum to the factor.
    """
    scores = torch.sigmoid(router_logits.float())
    choice = scores + bias
    if n_group > 1:
        choice = _mask_groups(choice, n_group, topk_group)
    ids = torch.topk(choice, top_k, -1).indices
    values = scores.gather(-1, ids)
    return values / (values.sum(-1, keepdim=True) + 1e-20) * routed_scaling_factor, ids.to(torch.int32)


def _mask_groups(choice: torch.Tensor, n_group: int, topk_group: int) -> torch.Tensor:
    groups = choice.unflatten(-1, (n_group, -1))
    worth = groups.topk(2, -1).values.sum(-1)
    best = worth.topk(topk_group, -1).indices
    dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)
    masked: torch.Tensor = groups.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
    return masked


def _shapes(router_logits: torch.Tensor, top_k: int, dtype: torch.dtype) -> Routed:
    shape = (router_logits.shape[0], top_k)
    return router_logits.new_empty(shape, dtype=dtype), router_logits.new_empty(shape, dtype=torch.int32)


def _default_op(router_logits: torch.Tensor, top_k: int, output_dtype: torch.dtype) -> Routed:
    values, ids = default_routing(router_logits, top_k, output_dtype)
    return ids, values


def _renorm_op(router_logits: torch.Tensor, top_k: int, output_dtype: torch.dtype) -> Routed:
    values, ids = renorm_routing(router_logits, top_k, output_dtype)
    return ids, values


def _softmax_meta(router_logits: torch.Tensor, top_k: int, output_dtype: torch.dtype) -> Routed:
    values, ids = _shapes(router_logits, top_k, output_dtype)
    return ids, values


def _noaux_meta(
    router_logits: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    routed_scaling_factor: float,
) -> Routed:
    return _shapes(router_logits, top_k, torch.float32)


_SOFTMAX = "(Tensor router_logits, int topk, ScalarType output_dtype) -> (Tensor, Tensor)"
register_op("trtllm::default_moe_routing_op" + _SOFTMAX, _default_op, _softmax_meta)
register_op("trtllm::renorm_moe_routing_op" + _SOFTMAX, _renorm_op, _softmax_meta)
register_op(
    "trtllm::noaux_tc_op(Tensor scores, Tensor bias, int n_group, int topk_group, int topk,"
    " float routed_scaling_factor) -> (Tensor, Tensor)",
    noaux_tc,
    _noaux_meta,
)
