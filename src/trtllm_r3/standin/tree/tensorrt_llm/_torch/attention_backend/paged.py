"""Access to a paged KV cache, shared by the operators that read it.

A layer's cache is `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`, keys at 0 and values at 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..op_library import register_op


class ContextSpan(NamedTuple):
    """One prefilling sequence: its rows `[start, end)` of the step and the tokens visible to the last one."""

    sequence: int
    start: int
    end: int
    visible: int


def write_kv(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store `k` and `v` `[T, num_kv_heads, head_dim]` at `slots` `[2, T]` (block, offset)."""
    where = (slots[0], slots[1])
    cache.select(1, 0).index_put_(where, k)
    cache.select(1, 1).index_put_(where, v)


def context_spans(
    host_seq_lens: torch.Tensor, host_kv_lens: torch.Tensor, num_contexts: int
) -> Iterator[ContextSpan]:
    """The prefilling sequences of a step, from the host copies of its lengths."""
    start = 0
    new, visible = host_seq_lens[:num_contexts].tolist(), host_kv_lens[:num_contexts].tolist()
    for index, (count, seen) in enumerate(zip(new, visible, strict=True)):
        yield ContextSpan(index, start, start + count, seen)
        start += count


def read_context(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first `length` tokens of `blocks` `[M]`, each `[length, kv_heads, head_dim]`."""
    pages = cache[blocks[: -(-length // cache.shape[2])]]
    keys, values = pages.unbind(1)
    return keys.flatten(0, 1)[:length], values.flatten(0, 1)[:length]


def generation_slots(
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    num_contexts: int,
    tokens_per_block: int,
    max_kv_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where decoding sequences lie: cache slots int64 `[2, B, S]` (block, offset), valid ones bool `[B, S]`.

    S is `max_kv_len`, so that a recording has room for longer sequences; on CPU only the columns in use are
    filled. Behind its end a sequence's last token is repeated: nothing is read that was never written.
    """
    tables, lens = block_tables[num_contexts:], kv_lens[num_contexts:]
    slots = torch.empty(2, len(lens), max_kv_len, dtype=torch.int64, device=lens.device)
    counts = torch.empty(len(lens), max_kv_len, dtype=torch.bool, device=lens.device)
    bound = columns_in_use(counts, lens)
    positions = torch.arange(bound, device=lens.device).unsqueeze(0)
    ends = lens.unsqueeze(1)
    clamped = torch.minimum(positions, ends - 1)
    slots[0, :, :bound] = tables.gather(1, clamped // tokens_per_block)
    slots[1, :, :bound] = clamped % tokens_per_block
    counts[:, :bound] = positions < ends
    return slots, counts


def columns_in_use(counts: torch.Tensor, kv_lens: torch.Tensor) -> int:
    """The longest sequence on CPU; all columns of `counts` on CUDA, which must not wait for a length."""
    return counts.shape[1] if counts.is_cuda else int(kv_lens.max())


def read_generation(
    cache: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, bound: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values `[B, S, kv_heads, head_dim]` of decoding sequences, valid ones; S is `bound`."""
    pages = cache[slots[0, :, :bound], :, slots[1, :, :bound]]
    keys, values = pages.unbind(2)
    return keys, values, counts[:, :bound]


def _slots_meta(
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    num_contexts: int,
    tokens_per_block: int,
    max_kv_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (kv_lens.shape[0] - num_contexts, max_kv_len)
    return kv_lens.new_empty(2, *shape), kv_lens.new_empty(shape, dtype=torch.bool)


register_op(
    "standin::generation_slots(Tensor block_tables, Tensor kv_lens, int num_contexts, int tokens_per_block,"
    " int max_kv_len) -> (Tensor, Tensor)",
    generation_slots,
    _slots_meta,
)
