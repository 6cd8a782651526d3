"""Turns a scheduled batch into the tensors of its forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..metadata import KVCacheParams
from .llm_request import LlmRequest
from .streams import to_device

if TYPE_CHECKING:
    from .sampler import SampleStateTensors
    from .scheduler import ScheduledRequests


@dataclass
class HostInputs:
    """Rows of a step in order: prompts, generations, padding.

    `from_device` are rows whose token only the device knows yet, with the slot it is found at.
    """

    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    request_ids: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    prompt_lens: list[int] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    from_device: list[tuple[int, int]] = field(default_factory=list)
    num_contexts: int = 0

    def add_context(self, request: LlmRequest) -> None:
        """The rows of a prompt's chunk."""
        begin, size = request.context_current_position, request.context_chunk_size
        self.input_ids.extend(request.get_tokens(0)[begin : begin + size])
        self._add(request, begin, size)
        request.cached_tokens = begin
        request.py_batch_idx = request.py_seq_slot
        self.num_contexts += 1

    def add_generation(self, request: LlmRequest, overlapped: bool) -> None:
        """The row of the newest token, unknown to the host if the step before is still `overlapped`."""
        slot = request.py_batch_idx
        if overlapped and slot is not None and not request.is_dummy:
            self.from_device.append((len(self.input_ids), slot))
            self.input_ids.append(0)
            position = request.max_beam_num_tokens
        else:
            self.input_ids.append(request.get_last_tokens(0))
            position = request.max_beam_num_tokens - 1
        self._add(request, position, 1)
        request.py_batch_idx = request.py_seq_slot

    def _add(self, request: LlmRequest, begin: int, size: int) -> None:
        self.positions.extend(range(begin, begin + size))
        self.request_ids.append(request.py_request_id)
        self.seq_lens.append(size)
        self.prompt_lens.append(request.py_prompt_len)
        self.num_cached_tokens.append(begin)


def collect_rows(batch: ScheduledRequests, overlapped: bool) -> HostInputs:
    """The rows of a batch; each request's `py_batch_idx` becomes its slot."""
    rows = HostInputs()
    for request in batch.context_requests:
        rows.add_context(request)
    for request in batch.generation_requests:
        rows.add_generation(request, overlapped)
    return rows


def fill_metadata(attn_metadata: Any, rows: HostInputs) -> None:
    """Describe the rows to attention."""
    attn_metadata.request_ids = rows.request_ids
    attn_metadata.seq_lens = torch.tensor(rows.seq_lens, dtype=torch.int32)
    attn_metadata.num_contexts = rows.num_contexts
    attn_metadata.prompt_lens = rows.prompt_lens
    attn_metadata.kv_cache_params = KVCacheParams(
        use_cache=True, num_cached_tokens_per_seq=rows.num_cached_tokens
    )
    attn_metadata.prepare()


def fill_tokens(
    rows: HostInputs,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    new_tokens: SampleStateTensors | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write ids and positions to the front of the device buffers; views of what was written."""
    count = len(rows.input_ids)
    ids, positions = input_ids[:count], position_ids[:, :count]
    ids.copy_(to_device(torch.tensor(rows.input_ids, dtype=torch.int32)), non_blocking=True)
    positions.copy_(to_device(torch.tensor([rows.positions], dtype=torch.int32)), non_blocking=True)
    if rows.from_device and new_tokens is not None:
        places, slots = to_device(torch.tensor(rows.from_device)).unbind(1)
        ids[places] = new_tokens.new_tokens[0, slots, 0]
    return ids, positions
