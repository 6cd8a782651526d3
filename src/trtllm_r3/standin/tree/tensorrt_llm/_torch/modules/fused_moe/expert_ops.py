"""Operators that compute experts: `standin::grouped_experts` for ids, `standin::fused_experts` from logits.

On CPU rows are sorted by expert and multiplied group by group. On CUDA every shape follows from those of the
inputs, nothing waits for a value, so that a graph can hold them. Weights are as `CutlassFusedMoE` keeps them:
`w3_w1` `[E, 2 * intermediate, hidden]` (up before gate), `w2` `[E, hidden, intermediate]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F

from ...op_library import register_op
from .grouped_blocks import BlockPlan, blocked_linear
from .routing import RoutingMethodType
from .routing_ops import default_routing, noaux_tc, renorm_routing

_GATHER_PAIRS = 8
_DENSE_WORK = 1 << 20
_Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def grouped_experts(
    x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None, w3_w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Sum of the outputs of each row's experts `ids` `[rows, k]` times `scales`; `[rows, hidden]` as `x`."""
    rows, top_k = ids.shape
    flat = ids.flatten().long()
    if rows == 0:
        return torch.zeros_like(x)
    if rows * w2.numel() <= _DENSE_WORK:
        return _dense(x, ids, scales, w3_w1, w2)
    if flat.numel() <= _GATHER_PAIRS:
        return _combine(_swiglu_gathered(x, flat, top_k, w3_w1, w2), scales, top_k)
    order = torch.argsort(flat, stable=True)
    multiply = _grouped_matmul(flat, order, w3_w1)
    up, gate = multiply(x[order // top_k], w3_w1).chunk(2, -1)
    sorted_out = multiply(F.silu(gate) * up, w2)
    out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
    return _combine(out, scales, top_k)


def fused_experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    bias: torch.Tensor | None,
    w3_w1: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    n_group: int,
    topk_group: int,
    routed_scaling_factor: float,
    routing_method_type: int,
) -> torch.Tensor:
    """Route the rows by `router_logits` `[rows, E]` and compute their experts, all in here."""
    if routing_method_type == RoutingMethodType.DeepSeekV3:
        assert bias is not None
        values, ids = noaux_tc(router_logits, bias, n_group, topk_group, top_k, routed_scaling_factor)
    else:
        route = default_routing if routing_method_type == RoutingMethodType.Default else renorm_routing
        values, ids = route(router_logits, top_k, torch.float32)
    return grouped_experts(x, ids, values, w3_w1, w2)


def _dense(
    x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None, w3_w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Little work: all experts see all rows, which takes the fewest kernels."""
    up, gate = torch.matmul(x, w3_w1.transpose(1, 2)).chunk(2, -1)
    out = torch.bmm(F.silu(gate) * up, w2.transpose(1, 2))
    pairs = out[ids.long(), torch.arange(x.shape[0], device=x.device).unsqueeze(1)]
    return _combine(pairs.flatten(0, 1), scales, ids.shape[1])


def _swiglu_gathered(
    x: torch.Tensor, flat: torch.Tensor, top_k: int, w3_w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Few pairs: the weights of each pair side by side."""
    pairs = x.repeat_interleave(top_k, 0).unsqueeze(-1)
    up, gate = torch.bmm(w3_w1[flat], pairs).chunk(2, 1)
    return torch.bmm(w2[flat], F.silu(gate) * up).squeeze(-1)


def _combine(pairs: torch.Tensor, scales: torch.Tensor | None, top_k: int) -> torch.Tensor:
    out: torch.Tensor = pairs.unflatten(0, (-1, top_k))
    if scales is not None:
        out = out * scales.unsqueeze(-1)
    return out.sum(1).to(pairs.dtype)


def _grouped_matmul(flat: torch.Tensor, order: torch.Tensor, weight: torch.Tensor) -> _Matmul:
    """A product of rows sorted by expert with weights `[E, out, in]`."""
    experts = weight.shape[0]
    bounds = torch.searchsorted(flat[order], torch.arange(experts + 1, device=flat.device))
    if (
        _has_grouped_mm(weight.device.type, weight.dtype)
        and weight.shape[1] % 16 == 0
        and weight.shape[2] % 16 == 0
    ):
        ends = bounds[1:].to(torch.int32)
        return lambda rows, w: torch._grouped_mm(rows, w.transpose(1, 2), offs=ends)
    if weight.is_cuda:
        plan = BlockPlan(bounds, flat[order])
        return lambda rows, w: blocked_linear(rows, w, plan)
    counts = bounds.diff().tolist()
    return lambda rows, w: torch.cat(
        [part @ w[e].t() for e, part in enumerate(rows.split(counts)) if len(part)]
    )


@lru_cache
def _has_grouped_mm(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies groups of this dtype itself, correctly also where a group is empty."""
    if not hasattr(torch, "_grouped_mm"):
        return False
    if device_type == "cuda":
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] == 9
    rows, weight = torch.arange(64, dtype=dtype).view(4, 16), torch.ones(3, 16, 16, dtype=dtype)
    try:
        out = torch._grouped_mm(rows, weight.transpose(1, 2), offs=torch.tensor([1, 1, 4], dtype=torch.int32))
    except (RuntimeError, NotImplementedError):
        return False
    return torch.equal(out, rows @ weight[0])


def _experts_meta(x: torch.Tensor, *args: object) -> torch.Tensor:
    return torch.empty_like(x)


register_op(
    "standin::grouped_experts(Tensor x, Tensor ids, Tensor? scales, Tensor w3_w1, Tensor w2) -> Tensor",
    grouped_experts,
    _experts_meta,
)
register_op(
    "standin::fused_experts(Tensor x, Tensor router_logits, Tensor? bias, Tensor w3_w1, Tensor w2, int top_k,"
    " int n_group, int topk_group, float routed_scaling_factor, int routing_method_type) -> Tensor",
    fused_experts,
    _experts_meta,
)
