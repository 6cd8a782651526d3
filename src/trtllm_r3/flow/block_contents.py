"""What each KV block is recorded to hold, so that a hit can be told from a block with other content.

B positions of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from .layout import Ints

NOTHING = np.zeros(0, np.int64)
_TOO_MANY = 1024  # blocks behind one prefix, beyond which a partial hit is not looked into


class BlockContents:
    """Tokens of each block and the key of all that comes before it, chained as the engine chains its own."""

    def __init__(self, blocks: int, tokens_per_block: int) -> None:
        self.blocks, self.tokens_per_block = blocks, tokens_per_block
        self.kv_epoch = 0  # how often the engine forgot all content
        self._tokens = np.full((blocks, tokens_per_block), -1, np.int64)
        self._parent: list[bytes] = [b""] * blocks  # key of everything before the block
        self._kv_epoch = np.full(blocks, -1, np.int64)
        self._users = np.zeros(blocks, np.int64)
        self._of_parent: dict[bytes, set[int]] = {}

    @property
    def nbytes(self) -> int:
        """Host memory."""
        return self._tokens.nbytes + self._kv_epoch.nbytes + self._users.nbytes

    def keys_of(self, scope: bytes, tokens: Sequence[int]) -> tuple[list[bytes], list[Ints]]:
        """(key of everything before block i, its tokens), one pair for each block that has a token."""
        size, flat = self.tokens_per_block, np.asarray(tokens, np.int64)
        parts = [flat[i : i + size] for i in range(0, len(flat), size)]
        keys = [blake2b(scope, digest_size=16).digest()]
        for part in parts[:-1]:
            keys.append(blake2b(keys[-1] + part.tobytes(), digest_size=16).digest())
        return keys[: len(parts)], parts

    def matches(self, block: int, key: bytes, tokens: Ints) -> bool:
        """Whether the block is recorded to start with these tokens, behind this prefix."""
        if block >= self.blocks or self._parent[block] != key:
            return False
        return np.array_equal(self._tokens[block, : len(tokens)], tokens)

    def counts(self, block: int) -> bool:
        """Whether the engine had not been reset since the block was recorded."""
        return bool(self._kv_epoch[block] == self.kv_epoch)

    def holds(self, block: int, key: bytes, tokens: Ints) -> bool:
        """Whether it matches and counts."""
        return self.matches(block, key, tokens) and self.counts(block)

    def sources_of(self, block: int, key: bytes, tokens: Ints) -> list[int]:
        """Blocks whose KV the leading slots of `block` may now hold; none if there are too many to tell."""
        siblings = self._of_parent.get(key, set())
        if len(siblings) > _TOO_MANY:
            return []
        other = np.fromiter((b for b in siblings if b != block), np.int64, len(siblings - {block}))
        other = other[(self._tokens[other, : len(tokens)] == tokens).all(1)]
        found = [b for b in other.tolist() if self._users[b] or self._has_children(b)]
        return [*([block] if self.matches(block, key, tokens) else []), *found]

    def describe(self, block: int, key: bytes, tokens: Ints, kv_epoch: int) -> None:
        """The block holds `tokens` behind the prefix of `key`."""
        if block >= self.blocks:
            return
        siblings = self._of_parent.get(self._parent[block])
        if siblings is not None:
            siblings.discard(block)
            if not siblings:
                del self._of_parent[self._parent[block]]
        self._parent[block], self._kv_epoch[block] = key, kv_epoch
        self._tokens[block] = -1
        self._tokens[block, : len(tokens)] = tokens
        if key:
            self._of_parent.setdefault(key, set()).add(block)

    def count(self, blocks: Sequence[int], change: int) -> None:
        """A request took these blocks (1) or gave them back (-1)."""
        for block in blocks:
            if block < self.blocks:
                self._users[block] += change

    def _has_children(self, block: int) -> bool:
        tokens = self._tokens[block]
        key = blake2b(self._parent[block] + tokens.tobytes(), digest_size=16).digest()
        return bool(tokens[-1] >= 0 and self._of_parent.get(key))
