"""Rows of KV blocks, for requests whose prefix the engine takes from its KV cache.

Equal tokens do not prove that a row belongs to the KV in a block: after eviction the same tokens are
computed again, perhaps with other routes. So a row lives where its KV lives, at (block, offset), written by
the very forward that wrote the KV there, and a hit is served only for blocks whose recorded content is the
hitting request's own prefix. What is not proven is not served.

B positions of a block, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from .causes import Cause
from .layout import Ints
from .ops import mark
from .request_store import Causes, Rows

_ABSENT = int(Cause.ABSENT)


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks of one incarnation of a request, and what was proven of those it hit."""

    slot: int
    scope: bytes
    kv_epoch: int
    step: int
    blocks: list[int]
    first: int  # first position that it computes itself; those before are hits
    proven: list[int] = field(default_factory=list)  # block that holds the rows of hit block i, -1: none
    sealed: int = 0  # its first positions whose tokens are recorded


class SharedRouteCache:
    """Rows by KV block id. The engine's ids name content for as long as a block is referenced."""

    def __init__(
        self, *, blocks: int, tokens_per_block: int, layers: int, top_k: int, dtype: npt.DTypeLike
    ) -> None:
        """`blocks`: those of the KV pool, or fewer: blocks with higher ids are then not recorded."""
        self.tokens_per_block, self.layers, self.top_k = tokens_per_block, layers, top_k
        self.dtype = np.dtype(dtype)
        self._row = np.dtype((np.void, layers * top_k * self.dtype.itemsize))
        self.blocks = blocks
        slots = blocks * tokens_per_block
        self._rows = np.empty(slots, self._row)  # touched, and so paid for, as blocks are used
        self._cause = np.zeros(slots, np.uint8)
        self._epoch = np.zeros(slots, np.int32)
        self._claimed = np.zeros(slots, np.int64)  # step from which on writes are the present user's
        self._tokens = np.full((blocks, tokens_per_block), -1, np.int64)
        self._parent: list[bytes] = [b""] * blocks  # key of everything before the block
        self._kv_epoch = np.full(blocks, -1, np.int64)
        self._users = np.zeros(blocks, np.int64)
        self._table = np.zeros((0, 0), np.int64)  # by store slot and block index: the block id
        self._of_parent: dict[bytes, set[int]] = {}
        self.kv_epoch = 0
        self.counters: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        """Host memory if every block is in use."""
        parts = (
            self._rows,
            self._cause,
            self._epoch,
            self._claimed,
            self._tokens,
            self._users,
            self._kv_epoch,
        )
        return sum(part.nbytes for part in parts)

    def lease(
        self,
        slot: int,
        scope: bytes,
        blocks: Sequence[int],
        tokens: Sequence[int],
        first: int,
        step: int,
    ) -> Lease:
        """The request in store slot `slot` starts to compute at position `first` in step `step`.

        Its first `first` tokens are hits in `blocks`. `scope`: what else the engine keys its content by.
        """
        lease = Lease(slot, scope, self.kv_epoch, step, list(blocks), first)
        keys, parts = self._keys(scope, tokens)
        whole, part = divmod(first, self.tokens_per_block)
        for i in range(whole):
            lease.proven.append(blocks[i] if self._holds(blocks[i], keys[i], parts[i]) else -1)
        if part:
            lease.proven.append(self._partial(blocks[whole], keys[whole], parts[whole][:part]))
            self._take_over(blocks[whole], lease.proven[-1], part, step)
        self._count(lease.blocks, 1)
        self._claim(lease.blocks, first, len(blocks) * self.tokens_per_block, step)
        self._record(lease, keys, parts, whole)
        self._list(lease, 0)
        lease.sealed = len(tokens)
        self.counters["hit_tokens"] += first
        return lease

    def extend(self, lease: Lease, blocks: Sequence[int], step: int) -> None:
        """The request got more blocks for step `step` on; they are behind those that it has."""
        fresh = blocks[len(lease.blocks) :]
        self._count(fresh, 1)
        self._claim(fresh, 0, len(fresh) * self.tokens_per_block, step)
        lease.blocks.extend(fresh)
        self._list(lease, len(lease.blocks) - len(fresh))

    def places(self, slot_N: Ints, position_N: Ints) -> Ints:
        """The KV slot (block * B + offset) of each of these positions, -1 for those that have none here."""
        index_N, offset_N = np.divmod(position_N, self.tokens_per_block)
        if not len(index_N) or max(int(slot_N.max()), 0) >= len(self._table):
            return np.full(len(index_N), -1, np.int64)
        known = index_N < self._table.shape[1]
        held = np.where(known, self._table[slot_N, np.where(known, index_N, 0)], -1)
        return np.where(held < 0, -1, held * self.tokens_per_block + offset_N)

    def let_go(self, lease: Lease, tokens: Sequence[int]) -> None:
        """The request ends or pauses with these tokens: those it generated become findable."""
        if lease.kv_epoch == self.kv_epoch:
            keys, parts = self._keys(lease.scope, tokens)
            self._record(lease, keys, parts, lease.sealed // self.tokens_per_block)
        self._count(lease.blocks, -1)
        self._table[lease.slot] = -1

    def write(self, at: Ints, rows_NLK: Rows, causes: Causes, epoch: int, step: int) -> None:
        """Rows of a step that landed, for KV slots `at` (block * B + offset); late ones are dropped."""
        mine = at < len(self._claimed)
        mine[mine] = self._claimed[at[mine]] <= step
        if not mine.all():
            at, rows_NLK, causes = at[mine], rows_NLK[mine], causes[mine]
        if len(at):
            packed = np.ascontiguousarray(rows_NLK).reshape(len(at), self.layers * self.top_k)
            self._rows[at] = packed.view(self._row)[:, 0]
            self._cause[at], self._epoch[at] = causes, epoch

    def read(self, lease: Lease, start: int, stop: int) -> tuple[Rows, Causes, npt.NDArray[np.int32]]:
        """(ids [T, L, K], causes [T], epochs [T]) of the hit positions [start, stop)."""
        positions = np.arange(start, stop)
        held = np.array(lease.proven or [-1], np.int64)[positions // self.tokens_per_block]
        at = np.maximum(held, 0) * self.tokens_per_block + positions % self.tokens_per_block
        causes = self._cause[at].copy()
        causes[causes == _ABSENT] = Cause.PREFIX
        causes[(held < 0) | (self._claimed[at] > lease.step)] = Cause.KV_RECOMPUTED
        rows = self._rows[at].view(self.dtype).reshape(len(at), self.layers, self.top_k).copy()
        rows[(causes == Cause.KV_RECOMPUTED) | (causes == Cause.PREFIX)] = mark(0, self.top_k)
        self.counters["served"] += int((causes == Cause.CAPTURED).sum())
        return rows, causes, self._epoch[at]

    def new_kv_epoch(self) -> None:
        """The engine forgot all content: nothing recorded so far is served to a later hit. Any thread."""
        self.kv_epoch += 1

    # -- the parts

    def _keys(self, scope: bytes, tokens: Sequence[int]) -> tuple[list[bytes], list[Ints]]:
        """(key of everything before block i, its tokens), one pair for each block that has a token."""
        size, flat = self.tokens_per_block, np.asarray(tokens, np.int64)
        parts = [flat[i : i + size] for i in range(0, len(flat), size)]
        keys = [blake2b(scope, digest_size=16).digest()]
        for part in parts[:-1]:
            keys.append(blake2b(keys[-1] + part.tobytes(), digest_size=16).digest())
        return keys[: len(parts)], parts

    def _list(self, lease: Lease, first: int) -> None:
        rows, columns = self._table.shape
        if lease.slot >= rows or len(lease.blocks) > columns:
            table = np.full(
                (max(rows, 2 * lease.slot, 16), max(columns, 2 * len(lease.blocks))), -1, np.int64
            )
            table[:rows, :columns] = self._table
            self._table = table
        self._table[lease.slot, first : len(lease.blocks)] = lease.blocks[first:]

    def _count(self, blocks: Sequence[int], change: int) -> None:
        for block in blocks:
            if block < self.blocks:
                self._users[block] += change

    def _matches(self, block: int, key: bytes, tokens: Ints) -> bool:
        """Whether the block is recorded to start with these tokens, behind this prefix."""
        if block >= self.blocks or self._parent[block] != key:
            return False
        return np.array_equal(self._tokens[block, : len(tokens)], tokens)

    def _counts(self, block: int) -> bool:
        """Whether the engine had not been reset since the block was recorded."""
        return bool(self._kv_epoch[block] == self.kv_epoch)

    def _holds(self, block: int, key: bytes, tokens: Ints) -> bool:
        return self._matches(block, key, tokens) and self._counts(block)

    def _partial(self, block: int, key: bytes, tokens: Ints) -> int:
        """Whose rows the leading tokens of a partly matching block have, -1 if nobody can tell.

        The engine takes over a leaf that nobody uses, under its own id; else it copies the tokens out of a
        block in use, or with blocks behind it, to a fresh id.
        """
        others = [b for b in self._of_parent.get(key, ()) if b != block and self._matches(b, key, tokens)]
        sources = [b for b in others if self._users[b] or self._has_children(b)]
        if self._matches(block, key, tokens):
            found = -1 if sources else block
        else:
            found = sources[0] if len(sources) == 1 else -1
        return found if found >= 0 and self._counts(found) else -1

    def _has_children(self, block: int) -> bool:
        tokens = self._tokens[block]
        key = blake2b(self._parent[block] + tokens.tobytes(), digest_size=16).digest()
        return bool(tokens[-1] >= 0 and self._of_parent.get(key))

    def _take_over(self, block: int, source: int, tokens: int, step: int) -> None:
        """Leading slots of a copied block: their rows lie elsewhere, so here they are nobody's."""
        if source != block < self.blocks:
            at = slice(block * self.tokens_per_block, block * self.tokens_per_block + tokens)
            self._cause[at], self._claimed[at] = _ABSENT, step

    def _claim(self, blocks: Sequence[int], first: int, stop: int, step: int) -> None:
        """From step `step` on only the request of these blocks writes to their slots [first, stop)."""
        slots = np.arange(first, stop)
        at = np.array(blocks or [0], np.int64)[slots // self.tokens_per_block] * self.tokens_per_block
        at += slots % self.tokens_per_block
        at = at[at < len(self._claimed)]
        self._cause[at], self._claimed[at] = _ABSENT, step

    def _record(self, lease: Lease, keys: list[bytes], parts: list[Ints], first: int) -> None:
        """Write down the content of the request's own blocks from index `first` on."""
        for i in range(first, min(len(parts), len(lease.blocks))):
            block = lease.blocks[i]
            if block >= self.blocks:
                continue
            self._of_parent.get(self._parent[block], set()).discard(block)
            if not self._of_parent.get(self._parent[block], True):
                del self._of_parent[self._parent[block]]
            self._parent[block], self._kv_epoch[block] = keys[i], lease.kv_epoch
            self._tokens[block] = -1
            self._tokens[block, : len(parts[i])] = parts[i]
            self._of_parent.setdefault(keys[i], set()).add(block)
