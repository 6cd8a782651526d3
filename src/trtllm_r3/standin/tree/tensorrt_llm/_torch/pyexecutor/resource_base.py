"""What managers of resources have in common. Imported from `resource_manager`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .llm_request import LlmRequest
    from .scheduler import ScheduledRequests


class BaseResourceManager(ABC):
    """One kind of resource. `free_resources` may come twice, and for requests that were only paused."""

    @abstractmethod
    def get_max_resource_count(self) -> int:
        """How much there is."""

    @abstractmethod
    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """How much a request takes in all."""

    def add_dummy_requests(self, request_ids: list[int]) -> object:
        """Take resources for dummies of warm-up forwards."""
        return None

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:  # noqa: B027
        """Take what the coming step needs."""

    def update_resources(self, scheduled_batch: ScheduledRequests) -> None:  # noqa: B027
        """Take note of a step that was answered."""

    def free_resources(self, request: LlmRequest) -> None:  # noqa: B027
        """Take back what a request holds."""

    def shutdown(self) -> None:  # noqa: B027
        """The engine ends."""


class SlotManager:
    """Numbers 0..max_num_requests-1, each lent to one request. ValueError when all are lent."""

    def __init__(self, max_num_requests: int) -> None:
        self.max_num_requests = max_num_requests
        self.slot_mapping: dict[int, int] = {}
        self.free_slots = set(range(max_num_requests))

    def get_slot(self, request_id: int) -> int | None:
        """The slot of a request."""
        return self.slot_mapping.get(request_id)

    def add_slot(self, request_id: int) -> int:
        """The lowest free slot, or the one the request has."""
        if request_id in self.slot_mapping:
            return self.slot_mapping[request_id]
        if not self.free_slots:
            raise ValueError(f"all {self.max_num_requests} slots are in use")
        slot = min(self.free_slots)
        self.free_slots.remove(slot)
        self.slot_mapping[request_id] = slot
        return slot

    def remove_slot(self, request_id: int) -> None:
        """Give the slot back; does nothing for a request without one."""
        slot = self.slot_mapping.pop(request_id, None)
        if slot is not None:
            self.free_slots.add(slot)

    def shutdown(self) -> None:
        """Forget all requests."""
        self.slot_mapping.clear()
        self.free_slots = set(range(self.max_num_requests))
