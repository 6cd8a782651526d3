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


def _write(target: torch.Tensor, ids: torch.Tensor, num_experts: int) -> None:
    """Narrow ids [..., K] into target; an id outside [0, E) must not wrap into a plausible one."""
    outside = ((ids < 0) | (ids >= num_experts)).any(-1, keepdim=True)
    target.copy_(ids.masked_fill(outside, mark(OUT_OF_RANGE, ids.shape[-1])))


def _capture_layer(
    routes_RLK: torch.Tensor, ids_NK: torch.Tensor, layer: int, row: int, num_experts: int
) -> None:
    _write(routes_RLK[row : row + ids_NK.shape[0], layer], ids_NK, num_experts)


def _capture_step(
    routes_RLK: torch.Tensor,
    ids: Sequence[torch.Tensor],
    layers: Sequence[int],
    rows: Sequence[int],
    witness_RK: torch.Tensor,
    witness: int,
    num_experts: int,
) -> None:
    chunks: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(rows):
        chunks.setdefault((row, ids[i].shape[0]), []).append(i)
    for (row, count), members in chunks.items():
        target_NLK = routes_RLK[row : row + count]
        if [layers[i] for i in members] == list(range(routes_RLK.shape[1])):
            _write(target_NLK, torch.stack([ids[i] for i in members], dim=1), num_experts)
        else:
            for i in members:
                _write(target_NLK[:, layers[i]], ids[i], num_experts)
        if witness in {layers[i] for i in members}:
            _compare(target_NLK[:, witness], witness_RK[row : row + count])


def _compare(gathered_NK: torch.Tensor, heard_NK: torch.Tensor) -> None:
    changed = (gathered_NK != heard_NK).any(-1, keepdim=True)
    gathered_NK.masked_fill_(changed, mark(CHANGED, gathered_NK.shape[-1]))


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
