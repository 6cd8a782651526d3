"""What travels from the worker to the caller: narrow ids and one block of metadata.

Both are plain CPU tensors that own their storage: those pass every unpickler between the two sides,
and a view would drag its whole storage along.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import RoutesMismatch, explain
from .causes import Cause
from .request_store import Causes, Epochs, Rows, missing_layers
from .routes import Gap, Routes, Run

VERSION = 1


class Payload(NamedTuple):
    """ids: uint8 or int16 [T, L, K] (None: no routes); meta: uint8 [bytes], JSON."""

    ids: torch.Tensor | None
    meta: torch.Tensor


def pack(
    rows_TLK: Rows,
    causes: Causes,
    epochs: Epochs,
    *,
    start: int,
    generated: int,
    moe_layer_ids: Sequence[int],
    num_experts: int,
    counters: Mapping[str, int],
) -> Payload:
    """Rows as they lie in the store, with causes and epochs as runs."""
    gaps = [(a, b, Cause(c).label) for a, b, c in runs(causes, start) if c != Cause.CAPTURED]
    meta = {
        "v": VERSION,
        "start": start,
        "generated": generated,
        "layers": list(moe_layer_ids),
        "experts": num_experts,
        "gaps": gaps,
        "versions": [run for run in runs(epochs, start) if run[2] >= 0],
        "counters": dict(counters),
    }
    return Payload(torch.from_numpy(rows_TLK), _tensor(meta))


def pack_none(why: str, counters: Mapping[str, int]) -> Payload:
    """No routes, and the reason."""
    return Payload(None, _tensor({"v": VERSION, "why_none": why, "counters": dict(counters)}))


def unpack(payload: Payload, num_generated: int) -> Routes:
    """The caller's side. `num_generated`: tokens the caller kept; rows of tokens it cut off are dropped."""
    meta = _dict(payload.meta)
    if meta.get("v") != VERSION:
        raise RoutesMismatch(
            explain(
                what="routes from the worker",
                expected=f"format {VERSION}",
                found=str(meta.get("v")),
                remedy="Install the same trtllm-r3 on both sides.",
            )
        )
    if payload.ids is None:
        return Routes(None, why_none=meta["why_none"], counters=meta["counters"])
    surplus = max(0, meta["generated"] - num_generated)
    narrow = payload.ids[: max(0, len(payload.ids) - surplus)]
    start, stop = meta["start"], meta["start"] + len(narrow)
    gaps = [Gap(a, min(b, stop), c) for a, b, c in meta["gaps"] if a < stop]
    return Routes(
        ids=_widen(narrow, gaps, start),
        start=start,
        moe_layer_ids=tuple(meta["layers"]),
        num_experts=meta["experts"],
        gaps=tuple(gaps),
        versions=tuple(Run(a, min(b, stop), v) for a, b, v in meta["versions"] if a < stop),
        counters=meta["counters"],
    )


def _widen(narrow_TLK: torch.Tensor, gaps: Sequence[Gap], start: int) -> torch.Tensor:
    ids = narrow_TLK.to(torch.int16, copy=True).contiguous()
    for gap in gaps:
        rows = ids[gap.start - start : gap.stop - start]
        rows[torch.from_numpy(missing_layers(rows.numpy()))] = -1
    return ids


def runs(values: npt.NDArray[Any], start: int) -> list[tuple[int, int, int]]:
    """Run lengths as (first, one past the last, value), counted from `start`."""
    edges = np.flatnonzero(np.diff(values)) + 1
    bounds = [0, *edges.tolist(), len(values)]
    return [(start + a, start + b, int(values[a])) for a, b in itertools.pairwise(bounds) if a < b]


def _tensor(meta: Mapping[str, Any]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(json.dumps(meta).encode(), np.uint8).copy())


def _dict(meta: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(meta.numpy().tobytes())
    return found
