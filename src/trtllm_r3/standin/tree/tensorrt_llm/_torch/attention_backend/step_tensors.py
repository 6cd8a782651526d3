"""Index tensors of one step, built on the host at once and moved in one copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..device import get_device
from . import paged as _paged  # noqa: F401  (registers standin::generation_slots)

IntArray = npt.NDArray[np.int64]


class _Shape(NamedTuple):
    """Sizes of a step: sequences, new tokens, columns of the block table."""

    seqs: int
    tokens: int
    blocks: int

    @property
    def total(self) -> int:
        return self.seqs * (self.blocks + 3) + 2 * self.tokens


class KvView(NamedTuple):
    """What an operator of any layer needs to write and read the cache, in the order of its arguments.

    `slots`, `block_tables` and the host's lengths are those of `StepTensors`; `seen_slots` `[2, G, S]` and
    `seen` bool `[G, S]` say where the tokens of the G decoding sequences lie.
    """

    slots: torch.Tensor
    block_tables: torch.Tensor
    host_seq_lens: torch.Tensor
    host_kv_lens: torch.Tensor
    seen_slots: torch.Tensor
    seen: torch.Tensor
    num_contexts: int


class StepTensors:
    """Where each sequence of a step lies in the paged cache. All int64.

    On the model's device: `seq_lens` `[B]` new tokens, `kv_lens` `[B]` visible tokens with the new ones,
    `last_tokens` `[B]` row of each sequence's last new token, `slots` `[2, T]` block and offset of each new
    token, `block_tables` `[B, M]`. On the host, for loops over prefilling sequences: `host_seq_lens`,
    `host_kv_lens` `[B]`. `max_kv_len` bounds `kv_lens` of decoding sequences.
    """

    seq_lens: torch.Tensor
    kv_lens: torch.Tensor
    last_tokens: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    host_seq_lens: torch.Tensor
    host_kv_lens: torch.Tensor

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_contexts = 0
        self.max_kv_len = 0
        self._shape: _Shape | None = None
        self._static = False

    @classmethod
    def eager(cls, tokens_per_block: int) -> StepTensors:
        """Tensors that are allocated anew by each `fill`."""
        return cls(tokens_per_block)

    @classmethod
    def static(cls, tokens_per_block: int, batch_size: int, blocks_per_seq: int) -> StepTensors:
        """Tensors for `batch_size` decoding sequences whose addresses never change."""
        tensors = cls(tokens_per_block)
        shape = _Shape(batch_size, batch_size, blocks_per_seq)
        with torch.inference_mode(False):
            tensors._bind(
                torch.zeros(shape.total, dtype=torch.int64, device=get_device()),
                torch.zeros(2, batch_size, dtype=torch.int64),
                shape,
            )
        tensors._static = True
        tensors.max_kv_len = blocks_per_seq * tokens_per_block
        return tensors

    def fill(
        self, seq_lens: torch.Tensor, cached: list[int], blocks: list[list[int]], num_contexts: int
    ) -> None:
        """Set all tensors for a step. ValueError if blocks are lacking or the step does not fit a graph."""
        new = seq_lens.numpy().astype(np.int64)
        visible = new + np.asarray(cached, dtype=np.int64)
        used = -(-visible // self.tokens_per_block)
        width = self._shape.blocks if self._static and self._shape else int(used.max(initial=1))
        shape = _Shape(len(new), int(new.sum()), width)
        table = _block_table(blocks, used, width)
        packed = _pack(table, new, visible, self.tokens_per_block)
        self._move(packed, np.stack((new, visible)), shape)
        self.num_contexts = num_contexts
        if not self._static:
            self.max_kv_len = int(visible[num_contexts:].max(initial=0))

    def kv_view(self) -> KvView:
        """Call it within each forward, so that a recording of the forward holds it."""
        sequences = self.kv_lens.shape[0]
        if self.num_contexts == sequences:
            seen_slots, seen = self.slots.new_empty(2, 0, 0), self.slots.new_empty(0, 0, dtype=torch.bool)
        else:
            seen_slots, seen = torch.ops.standin.generation_slots(
                self.block_tables, self.kv_lens, self.num_contexts, self.tokens_per_block, self.max_kv_len
            )
        return KvView(
            self.slots,
            self.block_tables,
            self.host_seq_lens,
            self.host_kv_lens,
            seen_slots,
            seen,
            self.num_contexts,
        )

    def _move(self, packed: IntArray, host: IntArray, shape: _Shape) -> None:
        if not self._static:
            self._bind(_to_device(torch.from_numpy(packed)), torch.from_numpy(host), shape)
            return
        if shape != self._shape:
            raise ValueError(f"a step of {shape} does not fit the graph buffers of {self._shape}")
        self._packed.copy_(_pinned(torch.from_numpy(packed)), non_blocking=True)
        self._host.copy_(torch.from_numpy(host))

    def _bind(self, packed: torch.Tensor, host: torch.Tensor, shape: _Shape) -> None:
        self._packed, self._host, self._shape = packed, host, shape
        seqs, tokens, blocks = shape
        parts = packed.split([seqs, seqs, seqs, 2 * tokens, seqs * blocks])
        self.seq_lens, self.kv_lens, self.last_tokens = parts[0], parts[1], parts[2]
        self.slots = parts[3].view(2, tokens)
        self.block_tables = parts[4].view(seqs, blocks)
        self.host_seq_lens, self.host_kv_lens = host[0], host[1]


def _block_table(blocks: list[list[int]], used: IntArray, width: int) -> IntArray:
    """`[B, width]` block ids; columns that no visible token needs are 0."""
    table = np.zeros((len(blocks), width), dtype=np.int64)
    for row, (ids, count) in enumerate(zip(blocks, used.tolist(), strict=True)):
        if len(ids) < count or count > width:
            raise ValueError(
                f"sequence {row} needs {count} KV blocks, has {len(ids)}, the table holds {width}"
            )
        table[row, :count] = ids[:count]
    return table


def _pack(table: IntArray, new: IntArray, visible: IntArray, tokens_per_block: int) -> IntArray:
    """All device tensors of a step, one behind the other."""
    ends = np.cumsum(new)
    rows = np.repeat(np.arange(len(new)), new)
    positions = np.arange(int(new.sum())) + np.repeat(visible - ends, new)
    block, offset = np.divmod(positions, tokens_per_block)
    return np.concatenate((new, visible, ends - 1, table[rows, block], offset, table.ravel()))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if get_device().type == "cuda" else tensor


def _to_device(tensor: torch.Tensor) -> torch.Tensor:
    return _pinned(tensor).to(get_device(), non_blocking=True)
