"""The arithmetic of the oracle model: exact integers, the same whatever else is in the batch.

`standin::oracle_attention` stores each row's (token, position) in the paged cache and returns, per row, a
checksum over all that is stored at the positions visible to it.
"""

from __future__ import annotations

import torch

from ..attention_backend.paged import columns_in_use, context_spans, read_context, read_generation, write_kv
from ..op_library import register_op

ROUTER_PRIME = 65521
CHECK_PRIME = 2147483647
_MISPLACED = 1000003


def route_base(tokens: torch.Tensor, positions: torch.Tensor, version: torch.Tensor) -> torch.Tensor:
    """What all layers' scores of a row derive from, int64 `[rows]` below `ROUTER_PRIME`."""
    return (7919 * tokens + 104729 * positions + 15485863 * version + 12345) % ROUTER_PRIME


def route_scores(base: torch.Tensor, layer_idx: int, experts: torch.Tensor) -> torch.Tensor:
    """Scores int64 `[rows, experts]` in one layer, all different within a row; `experts` is 0, 1, 2, ..."""
    base = ((base + 1299709 * (layer_idx + 1)) % ROUTER_PRIME).unsqueeze(1)
    first = (31 * base + 17) * base + 3
    stride = (40503 * base + 977) % (ROUTER_PRIME - 1) + 1
    return (first + stride * experts) % ROUTER_PRIME


def oracle_attention(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    host_seq_lens: torch.Tensor,
    host_kv_lens: torch.Tensor,
    seen_slots: torch.Tensor,
    seen: torch.Tensor,
    num_contexts: int,
) -> torch.Tensor:
    """Checksums int64 `[rows]` below `CHECK_PRIME`; `kv_cache` has one head of width 2, in float32."""
    pairs = torch.stack((tokens, positions), -1).to(kv_cache.dtype).unsqueeze(1)
    write_kv(kv_cache, pairs, pairs.flip(-1), slots)
    out = torch.empty_like(tokens)
    first = 0
    for span in context_spans(host_seq_lens, host_kv_lens, num_contexts):
        sums = _terms(*read_context(kv_cache, block_tables[span.sequence], span.visible)).cumsum(0)
        out[span.start : span.end] = sums[span.start - span.end :]
        first = span.end
    if first < tokens.shape[0]:
        bound = columns_in_use(seen, host_kv_lens[num_contexts:])
        keys, values, mask = read_generation(kv_cache, seen_slots, seen, bound)
        out[first:] = (_terms(keys, values) * mask).sum(-1)
    return out % CHECK_PRIME


def next_token(checks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The token int64 `[rows]` that follows, from the sum of all layers' checksums."""
    return (checks % CHECK_PRIME * 48271 + 11) % CHECK_PRIME % vocab_size


def _terms(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A term below `CHECK_PRIME` for each of `[..., S]` cached tokens; another one where it is misplaced."""
    token, position = keys.squeeze(-2).to(torch.int64).unbind(-1)
    again = values.squeeze(-2).to(torch.int64)
    place = torch.arange(token.shape[-1], device=token.device)
    mixed = ((token + 1) * 69069 + (position + 1) * 40507) % CHECK_PRIME
    wrong = (position - place).abs() + (again[..., 1] - token).abs() + (again[..., 0] - position).abs()
    return (mixed * mixed + 12289 * place + _MISPLACED * wrong) % CHECK_PRIME


def _meta(tokens: torch.Tensor, *args: object) -> torch.Tensor:
    return torch.empty_like(tokens)


register_op(
    "standin::oracle_attention(Tensor tokens, Tensor positions, Tensor(a!) kv_cache, Tensor slots,"
    " Tensor block_tables, Tensor host_seq_lens, Tensor host_kv_lens, Tensor seen_slots, Tensor seen,"
    " int num_contexts) -> Tensor",
    oracle_attention,
    _meta,
)
