"""The operator `standin::paged_attention`.

It is opaque to whoever records or compiles the model, and reads cache, block tables and lengths when it
runs, so that a recording stays right when the buffers of the step change.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..op_library import register_op
from .paged import columns_in_use, context_spans, read_context, read_generation, write_kv


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    host_seq_lens: torch.Tensor,
    host_kv_lens: torch.Tensor,
    seen_slots: torch.Tensor,
    seen: torch.Tensor,
    num_contexts: int,
    scale: float,
) -> torch.Tensor:
    """Write `k`, `v` `[T, Hkv, D]` to the cache, attend `q` `[T, H, D]` causally; result as `q`."""
    write_kv(kv_cache, k, v, slots)
    out = torch.empty_like(q)
    first = 0
    for span in context_spans(host_seq_lens, host_kv_lens, num_contexts):
        keys, values = read_context(kv_cache, block_tables[span.sequence], span.visible)
        out[span.start : span.end] = _attend_context(q[span.start : span.end], keys, values, scale)
        first = span.end
    if first < q.shape[0]:
        bound = columns_in_use(seen, host_kv_lens[num_contexts:])
        keys, values, mask = read_generation(kv_cache, seen_slots, seen, bound)
        out[first:] = _attend_generation(q[first:], keys, values, mask, scale)
    return out


def _attend_context(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence: the last `q.shape[0]` of its visible tokens attend to those before them."""
    new, visible = q.shape[0], keys.shape[0]
    mask = None
    if new != visible:
        mask = torch.ones(new, visible, dtype=torch.bool, device=q.device).tril(visible - new)
    out = _sdpa(
        q.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        mask,
        scale,
    )
    return out.squeeze(0).transpose(0, 1)


def _attend_generation(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """One row per sequence: `q` `[B, H, D]`, keys and values `[B, S, Hkv, D]`, of which `mask` `[B, S]`.

    The heads that share keys stand where positions usually do: all see the same.
    """
    grouped = q.unflatten(1, (keys.shape[2], -1))
    out = F.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask[:, None, None, :], scale=scale
    )
    return out.flatten(1, 2)


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1, scale=scale
    )


def _paged_attention_meta(q: torch.Tensor, *args: object) -> torch.Tensor:
    return torch.empty_like(q)


register_op(
    "standin::paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor slots,"
    " Tensor block_tables, Tensor host_seq_lens, Tensor host_kv_lens, Tensor seen_slots, Tensor seen,"
    " int num_contexts, float scale) -> Tensor",
    paged_attention,
    _paged_attention_meta,
)
