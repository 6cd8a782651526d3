"""Reads a scheduled batch: which rows the coming forward has, whose they are, which positions.

Rules (read in 1.1, 1.2 and main): context requests come first, with `context_chunk_size` rows from
`context_current_position`; then generation requests, one row each. Host state lags one token behind
where the previous step's tokens are still on the device and the request was in it (`py_batch_idx`).
"""

from __future__ import annotations

from typing import Any

from ..flow.layout import SKIP
from .engine import CapturedEngine

Spans = tuple[list[int], list[int], list[int]]  # store slots, first positions, rows


def read_spans(engine: CapturedEngine, batch: Any, *, overlapped: bool) -> Spans:
    """Spans of the step in row order; new requests whose rows are of use get a track."""
    slots: list[int] = []
    positions: list[int] = []
    counts: list[int] = []
    for request in batch.context_requests:
        position = request.context_current_position
        slots.append(_slot_in_context(engine, request, position))
        positions.append(position)
        counts.append(request.context_chunk_size)
    for request in batch.generation_requests:
        track = engine.track_of(request)
        if track is None:
            slots.append(SKIP)
            positions.append(0)
        else:
            lag = overlapped and request.py_batch_idx is not None
            position = request.max_beam_num_tokens - (not lag)
            engine.grow(request, track, position)
            slots.append(track.slot)
            positions.append(position)
        counts.append(1)
    return slots, positions, counts


def _slot_in_context(engine: CapturedEngine, request: Any, position: int) -> int:
    track = engine.track_of(request)
    if track is None:
        if not engine.wants(request):
            return SKIP
        track = engine.admit(request, position)
    elif track.paused:
        engine.resume(request, track, position)
    return track.slot


def fed_as_planned(batch: Any, spans: Spans, metadata: Any) -> bool | None:
    """Whether the attention metadata of the forward lists the same requests, lengths and positions.

    None if the metadata does not say.
    """
    fed = getattr(metadata, "request_ids", None)
    lengths = getattr(metadata, "seq_lens", None)
    cached = getattr(getattr(metadata, "kv_cache_params", None), "num_cached_tokens_per_seq", None)
    if fed is None or lengths is None or cached is None:
        return None
    slots, positions, counts = spans
    n = len(slots)
    planned = [r.py_request_id for r in (*batch.context_requests, *batch.generation_requests)]
    if list(fed[:n]) != planned or lengths[:n].tolist() != counts or len(cached) < n:
        return False
    return all(c == p for c, p, s in zip(cached, positions, slots, strict=False) if s != SKIP)
