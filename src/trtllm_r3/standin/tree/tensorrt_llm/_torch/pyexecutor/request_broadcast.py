"""Carries Python attributes of requests to other ranks: pickling a request drops them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .executor_request_queue import RequestQueueItem

ATTRIBUTES = (
    "py_logits_post_processors",
    "py_multimodal_data",
    "py_scheduling_params",
    "py_num_logprobs",
    "py_lora_path",
    "py_arrival_time",
)

PyObjects = tuple[str, dict[int, Any]]  # attribute name, values by request id


def collect_py_objects(new_requests: list[RequestQueueItem]) -> tuple[PyObjects, ...]:
    """The attributes that at least one of the requests has."""
    found = (_collect_py_objects_from_requests(new_requests, name) for name in ATTRIBUTES)
    return tuple(objects for objects in found if objects is not None)


def _collect_py_objects_from_requests(
    requests: list[RequestQueueItem], attribute_name: str
) -> PyObjects | None:
    values = {
        item.id: getattr(item.request, attribute_name)
        for item in requests
        if item.request is not None and getattr(item.request, attribute_name, None) is not None
    }
    return (attribute_name, values) if values else None


def attach_py_objects_to_requests(
    requests: list[RequestQueueItem], py_objects: tuple[PyObjects, ...]
) -> None:
    """Set what `collect_py_objects` found on the same requests of another rank."""
    for name, values in py_objects:
        for item in requests:
            if item.request is not None and item.id in values:
                setattr(item.request, name, values[item.id])
