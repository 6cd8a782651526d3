"""Slots of the sampler's device buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .resource_base import BaseResourceManager, SlotManager

if TYPE_CHECKING:
    from .llm_request import LlmRequest
    from .scheduler import ScheduledRequests


class SeqSlotManager(BaseResourceManager):
    """Gives each running sequence a slot `seq_slot`, from its first step until it ends or is paused."""

    def __init__(self, max_num_sequences: int) -> None:
        self.slot_manager = SlotManager(max_num_sequences)

    def get_max_resource_count(self) -> int:
        """Number of slots."""
        return self.slot_manager.max_num_requests

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """One slot."""
        return 1

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Slots for sequences that have none."""
        for request in scheduled_batch.all_requests():
            if request.seq_slot is None:
                request.seq_slot = self.slot_manager.add_slot(request.request_id)
                request.perf_metrics.scheduled()
            request.py_seq_slot = request.seq_slot

    def free_resources(self, request: LlmRequest) -> None:
        """Take the slot back."""
        self.slot_manager.remove_slot(request.request_id)

    def shutdown(self) -> None:
        """Forget all sequences."""
        self.slot_manager.shutdown()
