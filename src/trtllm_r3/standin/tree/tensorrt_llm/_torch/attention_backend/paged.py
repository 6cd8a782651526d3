"""Access to a paged KV cache, shared by the operators that read it.

A layer's cache is `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`, keys at 0 and values at 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


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


def read_generation(
    cache: torch.Tensor, tables: torch.Tensor, kv_lens: torch.Tensor, max_kv_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of decoding sequences, each `[B, S, kv_heads, head_dim]`; which count, bool `[B, S]`.

    S is the longest sequence on CPU, `max_kv_len` on CUDA, which must not wait for a length. Behind its end a
    sequence's last token is repeated, so that nothing is read that was never written.
    """
    bound = max_kv_len if kv_lens.is_cuda else int(kv_lens.max())
    positions = torch.arange(bound, device=kv_lens.device).expand(len(kv_lens), bound)
    ends = kv_lens.unsqueeze(1)
    clamped = torch.minimum(positions, ends - 1)
    size = cache.shape[2]
    where = (tables.gather(1, clamped // size), clamped % size)
    return cache.select(1, 0)[where], cache.select(1, 1)[where], positions < ends
