"""What the oracle model must route and say, in numpy, from its definition alone (not from the model's code).

Scores of experts e = 0 .. E-1 for (token t, position p, layer l, version v), with M = 65521:
    b = 7919 t + 104729 p + 15485863 v + 12345 + 1299709 (l + 1)            mod M
    score(e) = (31 b^2 + 17 b + 3) + e (1 + ((40503 b + 977) mod (M - 1)))  mod M
The ids are the K highest scores, highest first. With Q = 2^31 - 1 the sequence t_0 .. t_n goes on with
    g_i = 69069 (t_i + 1) + 40507 (i + 1) mod Q,   C = sum of (g_i^2 + 12289 i mod Q) mod Q
    next = ((C * layers (layers + 1) / 2 mod Q) * 48271 + 11 mod Q) mod vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

M = 65521
Q = 2**31 - 1

Ids = npt.NDArray[np.int16]


def moe_layer_ids(config: Mapping[str, Any]) -> list[int]:
    """Decoder indices of the layers that route."""
    return list(range(config["first_k_dense_replace"], config["num_hidden_layers"]))


def expected_ids(
    tokens: Sequence[int] | npt.NDArray[Any],
    positions: Sequence[int] | npt.NDArray[Any] | None,
    layers: Iterable[int] | None,
    config: Mapping[str, Any],
    version: int | npt.NDArray[Any] = 0,
) -> Ids:
    """int16 `[n, L, K]`; positions default to 0 .. n-1, layers to all that route; version may be per row."""
    token = np.asarray(tokens, dtype=np.int64)[:, None]
    position = np.arange(len(token)) if positions is None else np.asarray(positions, dtype=np.int64)
    layer = np.asarray(list(moe_layer_ids(config) if layers is None else layers), dtype=np.int64)[None, :]
    b = (
        7919 * token
        + 104729 * position[:, None]
        + 15485863 * np.asarray(version).reshape(-1, 1)
        + 12345
        + 1299709 * (layer + 1)
    ) % M
    step = 1 + (40503 * b + 977) % (M - 1)
    experts = np.arange(config["num_experts"])
    scores = ((31 * b * b + 17 * b + 3)[..., None] + experts * step[..., None]) % M
    order = np.argsort(-scores, axis=-1, kind="stable")
    return order[..., : config["num_experts_per_tok"]].astype(np.int16)


def expected_next_token(tokens: Sequence[int], config: Mapping[str, Any]) -> int:
    """The token that greedy decoding appends to `tokens`."""
    return _Running(config).feed(tokens)


def expected_continuation(
    tokens: Sequence[int], count: int, config: Mapping[str, Any], end_id: int | None = None
) -> list[int]:
    """Up to `count` greedy tokens, the last one `end_id` if it comes."""
    running = _Running(config)
    following = [running.feed(tokens)]
    while len(following) < count and following[-1] != end_id:
        following.append(running.feed(following[-1:]))
    return following[:count]


class _Running:
    """The checksum of a growing sequence."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        layers = int(config["num_hidden_layers"])
        self.weight = layers * (layers + 1) // 2
        self.vocab_size = int(config["vocab_size"])
        self.check = 0
        self.length = 0

    def feed(self, tokens: Iterable[int]) -> int:
        for token in tokens:
            g = (69069 * (int(token) + 1) + 40507 * (self.length + 1)) % Q
            self.check = (self.check + (g * g + 12289 * self.length) % Q) % Q
            self.length += 1
        return (self.check * self.weight % Q * 48271 + 11) % Q % self.vocab_size
