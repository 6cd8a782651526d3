"""Resources of requests, each kind with a manager of its own, asked in a fixed order."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from .kv_cache_manager import KVCacheManager
from .resource_base import BaseResourceManager, SlotManager

if TYPE_CHECKING:
    from .llm_request import LlmRequest
    from .scheduler import ScheduledRequests

__all__ = ["BaseResourceManager", "KVCacheManager", "ResourceManager", "ResourceManagerType", "SlotManager"]


class ResourceManagerType(enum.Enum):
    """Keys of the managers that the engine knows."""

    KV_CACHE_MANAGER = "KV_CACHE_MANAGER"
    DRAFT_KV_CACHE_MANAGER = "DRAFT_KV_CACHE_MANAGER"
    PEFT_CACHE_MANAGER = "PEFT_CACHE_MANAGER"
    SEQ_SLOT_MANAGER = "SEQ_SLOT_MANAGER"
    SPEC_RESOURCE_MANAGER = "SPEC_RESOURCE_MANAGER"


class ResourceManager:
    """All managers of an engine in order. Keys need not be of ResourceManagerType; values may be None."""

    def __init__(self, resource_managers: dict[Any, BaseResourceManager | None]) -> None:
        managers: OrderedDict[Hashable, BaseResourceManager | None] = OrderedDict(resource_managers)
        self.resource_managers = managers

    def __call__(self, type: Hashable) -> BaseResourceManager | None:
        return self.resource_managers[type]

    def register_resource_manager(self, type: Hashable, resource_manager: BaseResourceManager | None) -> None:
        """Add or replace a manager."""
        self.resource_managers[type] = resource_manager

    def get_resource_manager(self, type: Hashable) -> Any:
        """The manager of a key, None if there is none."""
        return self.resource_managers.get(type)

    def reorder_pipeline(self, resource_manager_list: list[Hashable]) -> None:
        """Ask in this order from now on. AssertionError unless it names all of them."""
        assert set(resource_manager_list) == set(self.resource_managers)
        for key in resource_manager_list:
            self.resource_managers.move_to_end(key)

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Before a step, first manager first."""
        for manager in self.resource_managers.values():
            if manager is not None and hasattr(manager, "prepare_resources"):
                manager.prepare_resources(scheduled_batch)

    def update_resources(
        self,
        scheduled_batch: ScheduledRequests,
        attn_metadata: Any = None,
        kv_cache_dtype_byte_size: float | None = None,
    ) -> None:
        """After a step was answered, first manager first; only the KV cache gets the further arguments."""
        for key, manager in self.resource_managers.items():
            if manager is None or not hasattr(manager, "update_resources"):
                continue
            if key is ResourceManagerType.KV_CACHE_MANAGER:
                manager.update_resources(scheduled_batch, attn_metadata, kv_cache_dtype_byte_size)  # type: ignore[call-arg]
            else:
                manager.update_resources(scheduled_batch)

    def free_resources(self, request: LlmRequest) -> None:
        """A request ended or was paused: last manager first."""
        for manager in reversed(self.resource_managers.values()):
            if manager is not None and hasattr(manager, "free_resources"):
                manager.free_resources(request)
