"""Products of rows sorted by expert, in blocks of fixed size: every shape follows from the number of rows."""

from __future__ import annotations

import torch

_MAX_GATHERED_BYTES = 256 << 20


class BlockPlan:
    """Where rows sorted by expert go when each expert's rows start a block of their own.

    `bounds` `[E + 1]`: first row of each expert and the end; `experts` `[rows]`: expert of each row.
    `target` `[rows]`: row in the padded order; `block_experts` `[blocks]`: expert of each block.
    """

    def __init__(self, bounds: torch.Tensor, experts: torch.Tensor) -> None:
        rows, num_experts = experts.shape[0], bounds.shape[0] - 1
        self.size = max(1, min(64, rows // num_experts))
        self.count = rows // self.size + min(num_experts, rows)
        blocks = (bounds.diff() + self.size - 1) // self.size
        ends = blocks.cumsum(0)
        first_rows = (ends - blocks) * self.size
        self.target = first_rows[experts] + torch.arange(rows, device=experts.device) - bounds[experts]
        indices = torch.arange(self.count, device=experts.device)
        self.block_experts = torch.searchsorted(ends, indices, right=True).clamp_(max=num_experts - 1)


def blocked_linear(rows: torch.Tensor, weight: torch.Tensor, plan: BlockPlan) -> torch.Tensor:
    """`rows` `[n, in]`, sorted by expert, times the `[E, out, in]` weight of each; `[n, out]`.

    Weights are gathered for a few blocks at a time, to bound the memory.
    """
    padded = rows.new_zeros(plan.count * plan.size, rows.shape[1]).index_copy_(0, plan.target, rows)
    blocks = padded.view(plan.count, plan.size, -1)
    step = max(1, _MAX_GATHERED_BYTES // (weight[0].numel() * weight.element_size()))
    parts = [
        torch.bmm(part, weight[experts].transpose(1, 2))
        for part, experts in zip(blocks.split(step), plan.block_experts.split(step), strict=True)
    ]
    return torch.cat(parts).flatten(0, 1)[plan.target]
