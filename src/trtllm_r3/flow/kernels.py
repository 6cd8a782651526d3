"""The CUDA side of the two ops: one Triton kernel that narrows, checks and compares in a single pass.

Imported only where there is a GPU; torch brings Triton along there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_GROUPS = 32  # (row, layer) pairs of one program


# Nothing that varies from step to step is specialised on: a compilation in service would stall it.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["groups", "row", "first", "within", "layers", "witness", "experts"]
)
def _narrow(  # type: ignore[no-untyped-def]
    ids, out, heard, groups, row, first, within, layers, witness, experts,
    outside: tl.constexpr, changed: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, KP)
    live = (group < groups)[:, None] & (column < K)[None, :]
    at_row, layer = row + group // within, first + group % within
    chosen = tl.load(ids + group[:, None] * K + column[None, :], mask=live, other=0).to(tl.int32)
    stray = tl.max(((chosen < 0) | (chosen >= experts)) & live, axis=1) > 0
    chosen = tl.where(stray[:, None], outside, chosen)
    watched = live & (layer == witness)[:, None]
    seen = tl.load(heard + at_row[:, None].to(tl.int64) * K + column[None, :], mask=watched, other=0)
    differs = tl.max((seen.to(tl.int32) != chosen) & watched, axis=1) > 0
    chosen = tl.where(differs[:, None], changed, chosen)
    place = (at_row.to(tl.int64) * layers + layer)[:, None] * K + column[None, :]
    tl.store(out + place, chosen.to(out.dtype.element_ty), mask=live)


def narrow(
    ids: torch.Tensor,
    routes_RLK: torch.Tensor,
    *,
    row: int,
    first: int,
    num_experts: int,
    witness_RK: torch.Tensor,
    witness: int,
    marks: tuple[int, int],
) -> None:
    """Write ids [N, layers, K] to rows `row`.. and layers `first`.. of the buffer.

    marks: what stands for an id out of range, and for ids of layer `witness` that differ from witness_RK.
    """
    ids = ids.contiguous()
    top_k = ids.shape[-1]
    groups = ids.numel() // top_k
    if not groups:
        return
    grid: Any = (triton.cdiv(groups, _GROUPS),)
    _narrow[grid](
        ids, routes_RLK, witness_RK, groups, row, first, groups // ids.shape[0], routes_RLK.shape[1],
        witness, num_experts, marks[0], marks[1], top_k, triton.next_power_of_2(top_k), _GROUPS,
    )  # fmt: skip
