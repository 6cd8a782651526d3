"""What the routers of the fake loop choose: a pure function of (token, position, layer, nonce).

The nonce is the number of the forward, so that a row of the wrong forward is as wrong as any other.
N rows, L layers, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class Shape(NamedTuple):
    """Sizes of a fake model; all of them differ."""

    layers: int = 5
    top_k: int = 3
    experts: int = 11
    max_rows: int = 24


def expected_ids(
    tokens: Sequence[int] | npt.NDArray[Any],
    positions: Sequence[int] | npt.NDArray[Any],
    shape: Shape,
    nonces: int | Sequence[int] = 0,
) -> Ids:
    """int32 [N, L, K]: K distinct ids in [0, E), in no particular order."""
    token, position = (np.asarray(x, np.uint64).reshape(-1, 1, 1) for x in (tokens, positions))
    nonce = np.asarray(nonces, np.uint64).reshape(-1, 1, 1)
    layer = np.arange(shape.layers, dtype=np.uint64)[None, :, None]
    expert = np.arange(shape.experts, dtype=np.uint64)[None, None, :]
    mixed = _mix(_mix(_mix(_mix(token) + position) + layer) + nonce)
    scores = _mix(mixed + expert)
    return np.argsort(scores, axis=-1, kind="stable")[..., : shape.top_k].astype(np.int32)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: neighbours come out unrelated."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
