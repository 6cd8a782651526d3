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

import numpy as np
import numpy.typing as npt

from .block_contents import NOTHING, BlockContents
from .causes import Cause
from .layout import Ints
from .ops import mark
from .request_store import Causes, Epochs, Rows

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
    source: tuple[int, int, int] | None = None  # (block copied from, to, tokens), until its rows landed
    sealed: int = 0  # its first positions whose tokens are recorded


class SharedRouteCache:
    """Rows by KV block id. The engine's ids name content for as long as a block is referenced."""

    def __init__(
        self,
        *,
        blocks: int,
        tokens_per_block: int,
        layers: int,
        top_k: int,
        dtype: npt.DTypeLike,
        complete: bool = True,
    ) -> None:
        """`blocks`: those of the KV pool; fewer, with `complete=False`: higher ids are not recorded."""
        self.complete = complete
        self.tokens_per_block, self.layers, self.top_k = tokens_per_block, layers, top_k
        self.dtype = np.dtype(dtype)
        self._row = np.dtype((np.void, layers * top_k * self.dtype.itemsize))
        self.blocks, self.contents = blocks, BlockContents(blocks, tokens_per_block)
        slots = blocks * tokens_per_block
        self._rows = np.empty(slots, self._row)  # touched, and so paid for, as blocks are used
        self._cause = np.zeros(slots, np.uint8)
        self._epoch = np.zeros(slots, np.int32)
        self._claimed = np.zeros(slots, np.int64)  # step from which on writes are the present user's
        self._table = np.zeros((0, 0), np.int64)  # by store slot and block index: the block id
        self.counters: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        """Host memory if every block is in use."""
        parts = (self._rows, self._cause, self._epoch, self._claimed)
        return self.contents.nbytes + sum(part.nbytes for part in parts)

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
        lease = Lease(slot, scope, self.contents.kv_epoch, step, list(blocks), first)
        keys, parts = self.contents.keys_of(scope, tokens)
        whole, part = divmod(first, self.tokens_per_block)
        for i in range(whole):
            lease.proven.append(blocks[i] if self.contents.holds(blocks[i], keys[i], parts[i]) else -1)
        if part:
            lease.proven.append(blocks[whole] if blocks[whole] < self.blocks else -1)
            self._fill_partial(lease, blocks[whole], keys[whole], parts[whole][:part])
        self.contents.count(lease.blocks, 1)
        self._claim(lease.blocks, first, len(blocks) * self.tokens_per_block, step)
        self._record(lease, keys, parts, whole)
        self._list(lease, 0)
        lease.sealed = len(tokens)
        self.counters["hit_tokens"] += first
        return lease

    def extend(self, lease: Lease, blocks: Sequence[int], step: int) -> None:
        """The request got more blocks for step `step` on; they are behind those that it has."""
        fresh = blocks[len(lease.blocks) :]
        self.contents.count(fresh, 1)
        self._claim(fresh, 0, len(fresh) * self.tokens_per_block, step)
        for block in fresh:
            self.contents.describe(block, b"", NOTHING, -1)  # nobody knows yet what it will hold
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
        self._settle(lease)
        if lease.kv_epoch == self.contents.kv_epoch:
            keys, parts = self.contents.keys_of(lease.scope, tokens)
            self._record(lease, keys, parts, lease.sealed // self.tokens_per_block)
        self.contents.count(lease.blocks, -1)
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

    def read(self, lease: Lease, start: int, stop: int) -> tuple[Rows, Causes, Epochs]:
        """(ids [T, L, K], causes [T], epochs [T]) of the hit positions [start, stop)."""
        self._settle(lease)
        positions = np.arange(start, stop)
        held = np.array(lease.proven or [-1], np.int64)[positions // self.tokens_per_block]
        at = np.maximum(held, 0) * self.tokens_per_block + positions % self.tokens_per_block
        causes = self._cause[at].copy()
        causes[causes == _ABSENT] = Cause.PREFIX
        causes[held < 0] = Cause.KV_RECOMPUTED
        rows = self._rows[at].view(self.dtype).reshape(len(at), self.layers, self.top_k)
        rows[(causes == Cause.KV_RECOMPUTED) | (causes == Cause.PREFIX)] = mark(0, self.top_k)
        self.counters["served"] += int((causes == Cause.CAPTURED).sum())
        return rows, causes, self._epoch[at]

    def new_kv_epoch(self) -> None:
        """The engine forgot all content: nothing recorded so far is served to a later hit. Any thread."""
        self.contents.kv_epoch += 1

    # -- the parts

    def _list(self, lease: Lease, first: int) -> None:
        rows, columns = self._table.shape
        if lease.slot >= rows or len(lease.blocks) > columns:
            table = np.full(
                (max(rows, 2 * lease.slot, 16), max(columns, 2 * len(lease.blocks))), -1, np.int64
            )
            table[:rows, :columns] = self._table
            self._table = table
        self._table[lease.slot, first : len(lease.blocks)] = lease.blocks[first:]

    def _fill_partial(self, lease: Lease, block: int, key: bytes, tokens: Ints) -> None:
        """Give the leading slots of a partly matching block the rows of the KV that they now hold.

        The engine takes over a leaf that nobody uses, under its own id; else it copies the tokens out of a
        block that is in use or has blocks behind it, to a fresh id. It does not say which. So the rows are
        known where all blocks that it can have been agree on them.
        """
        if block >= self.blocks:
            return
        at = self._leading(block, len(tokens))
        sources = self.contents.sources_of(block, key, tokens) if self.complete else []
        counts = bool(sources) and all(self.contents.counts(b) for b in sources)
        if not counts:
            self._cause[at], self._claimed[at] = Cause.KV_RECOMPUTED, lease.step
        elif sources != [block]:
            lease.source = (sources[0], block, len(tokens)) if len(sources) == 1 else None
            self._copy(sources, at)
            self._claimed[at] = lease.step

    def _copy(self, sources: list[int], at: slice) -> None:
        """Rows on which all sources agree; elsewhere nobody knows."""
        count = at.stop - at.start
        first, *others = (self._leading(b, count) for b in sources)
        rows, cause = self._rows[first].copy(), self._cause[first].copy()
        for other in others:
            same = (self._rows[other] == rows) & (self._cause[other] == Cause.CAPTURED)
            cause[~same | (cause != Cause.CAPTURED)] = Cause.KV_RECOMPUTED
        self._rows[at], self._cause[at], self._epoch[at] = rows, cause, self._epoch[first]

    def _settle(self, lease: Lease) -> None:
        """Rows of a copied block that were still on their way to the host when it was copied."""
        if lease.source is None:
            return
        source, block, count = lease.source
        to, out_of = self._leading(block, count), self._leading(source, count)
        late = (self._cause[to] == _ABSENT) & (self._claimed[out_of] < lease.step)
        for values in (self._rows, self._cause, self._epoch):
            values[to][late] = values[out_of][late]

    def _leading(self, block: int, count: int) -> slice:
        return slice(block * self.tokens_per_block, block * self.tokens_per_block + count)

    def _claim(self, blocks: Sequence[int], first: int, stop: int, step: int) -> None:
        """From step `step` on only the request of these blocks writes to their slots [first, stop)."""
        slots = np.arange(first, stop)
        at = np.array(blocks or [0], np.int64)[slots // self.tokens_per_block] * self.tokens_per_block
        at += slots % self.tokens_per_block
        at = at[at < len(self._claimed)]
        self._cause[at], self._claimed[at] = _ABSENT, step

    def _record(self, lease: Lease, keys: list[bytes], parts: list[Ints], first: int) -> None:
        """Write down the content of the request's own blocks from index `first` on."""
        for i in range(first, len(lease.blocks)):
            key, part = (keys[i], parts[i]) if i < len(parts) else (b"", NOTHING)
            self.contents.describe(lease.blocks[i], key, part, lease.kv_epoch)
