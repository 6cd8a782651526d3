"""The two custom ops that write expert ids into the device buffer, and the marks of missing ids.

R rows of the buffer, N rows of one call, L MoE layers, K experts a token, E experts of the model.

K experts of a token are distinct, so "K times the same id" can't be a real top-k: it is the mark of
a missing (row, layer), and the id itself is an index into DEVICE_CAUSES. With K = 1 there is no such
spare pattern; then the buffer is int16 and the mark is -1, -2, -3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

NOT_CAPTURED, OUT_OF_RANGE, CHANGED = range(3)


def narrow_dtype(num_experts: int, top_k: int) -> torch.dtype:
    """uint8 where every id fits and K leaves room for the mark, else int16."""
    return torch.uint8 if num_experts <= 256 and top_k > 1 else torch.int16


def mark(code: int, top_k: int) -> int:
    """The repeated id that stands for DEVICE_CAUSES[code]."""
    return code if top_k > 1 else -1 - code


# Library and not the custom_op decorator: its dispatch costs a third as much for each call.
_lib = torch.library.Library("trtllm_r3", "FRAGMENT")
_lib.define("capture_layer(Tensor(a!) routes_RLK, Tensor ids_NK, int layer, int row, int num_experts) -> ()")
_lib.define(
    "capture_step(Tensor(a!) routes_RLK, Tensor[] ids, int[] layers, int[] rows, "
    "Tensor witness_RK, int witness, int num_experts) -> ()"
)


def _put(
    ids_NMK: torch.Tensor,
    routes_RLK: torch.Tensor,
    row: int,
    first: int,
    num_experts: int,
    witness_RK: torch.Tensor,
    witness: int,
) -> None:
    """Narrow M neighbouring layers from `first` on; a bad id must not wrap into a plausible one."""
    marks = mark(OUT_OF_RANGE, ids_NMK.shape[-1]), mark(CHANGED, ids_NMK.shape[-1])
    if routes_RLK.is_cuda:
        from .kernels import narrow

        narrow(
            ids_NMK,
            routes_RLK,
            row=row,
            first=first,
            num_experts=num_experts,
            witness_RK=witness_RK,
            witness=witness,
            marks=marks,
        )
        return
    count, layers, _ = ids_NMK.shape
    target = routes_RLK[row : row + count, first : first + layers]
    outside = ((ids_NMK < 0) | (ids_NMK >= num_experts)).any(-1, keepdim=True)
    target.copy_(ids_NMK.masked_fill(outside, marks[0]))
    if first <= witness < first + layers:
        watched = target[:, witness - first]
        watched.masked_fill_((watched != witness_RK[row : row + count]).any(-1, keepdim=True), marks[1])


def _capture_layer(
    routes_RLK: torch.Tensor, ids_NK: torch.Tensor, layer: int, row: int, num_experts: int
) -> None:
    _put(ids_NK[:, None], routes_RLK, row, layer, num_experts, routes_RLK, -1)


def _capture_step(
    routes_RLK: torch.Tensor,
    ids: Sequence[torch.Tensor],
    layers: Sequence[int],
    rows: Sequence[int],
    witness_RK: torch.Tensor,
    witness: int,
    num_experts: int,
) -> None:
    chunks: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
    for layer, row, part in zip(layers, rows, ids, strict=True):
        chunks.setdefault((row, part.shape[0]), {})[layer] = part
    for (row, _), parts in chunks.items():
        first = min(parts)
        if list(parts) == list(range(first, first + len(parts))):
            stacked = torch.stack(list(parts.values()), dim=1)
            _put(stacked, routes_RLK, row, first, num_experts, witness_RK, witness)
        else:
            for layer, part in parts.items():
                _put(part[:, None], routes_RLK, row, layer, num_experts, witness_RK, witness)


_lib.impl("capture_layer", _capture_layer, "CompositeExplicitAutograd")
_lib.impl("capture_step", _capture_step, "CompositeExplicitAutograd")


def _fake_layer(
    routes_RLK: torch.Tensor, ids_NK: torch.Tensor, layer: int, row: int, num_experts: int
) -> None: ...


def _fake_step(
    routes_RLK: torch.Tensor,
    ids: Sequence[torch.Tensor],
    layers: Sequence[int],
    rows: Sequence[int],
    witness_RK: torch.Tensor,
    witness: int,
    num_experts: int,
) -> None: ...


torch.library.register_fake("trtllm_r3::capture_layer", _fake_layer, lib=_lib)
torch.library.register_fake("trtllm_r3::capture_step", _fake_step, lib=_lib)

capture_layer = torch.ops.trtllm_r3.capture_layer.default
capture_step = torch.ops.trtllm_r3.capture_step.default
