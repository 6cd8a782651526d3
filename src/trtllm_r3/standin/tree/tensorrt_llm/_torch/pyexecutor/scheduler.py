"""Chooses the requests of a step: first those whose KV fits, then those whose tokens fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from .capacity_scheduler import BindCapacityScheduler, CapacityScheduler
from .llm_request import LlmRequest
from .micro_batch_scheduler import BindMicroBatchScheduler, MicroBatchScheduler

__all__ = [
    "BindCapacityScheduler",
    "BindMicroBatchScheduler",
    "CapacityScheduler",
    "MicroBatchScheduler",
    "RequestList",
    "RequestScheduler",
    "ScheduledRequests",
    "SchedulerOutput",
    "SimpleScheduler",
]

RequestList = list[LlmRequest]


class SchedulerOutput(NamedTuple):
    """What a scheduler decided for a step."""

    context_requests: RequestList
    generation_requests: RequestList
    paused_requests: RequestList
    fitting_disagg_gen_init_requests: RequestList
    num_fitting_requests: int


class ScheduledRequests:
    """The requests of a step. Rows of its forward: contexts in order, then generations in order."""

    def __init__(self) -> None:
        self.context_requests: RequestList = []
        self.generation_requests: RequestList = []
        self.paused_requests: RequestList = []

    @property
    def is_generation_only(self) -> bool:
        """Whether only single tokens are computed."""
        return not self.context_requests

    @property
    def can_run_cuda_graph(self) -> bool:
        """Whether a recorded forward can be replayed."""
        return not self.context_requests

    @property
    def num_context_requests(self) -> int:
        """Number of prompts."""
        return len(self.context_requests)

    @property
    def num_generation_requests(self) -> int:
        """Number of generations."""
        return len(self.generation_requests)

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return len(self.context_requests) + len(self.generation_requests)

    def all_requests(self) -> RequestList:
        """Contexts, then generations."""
        return self.context_requests + self.generation_requests


class RequestScheduler(ABC):
    """Chooses the requests of a step."""

    @abstractmethod
    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> SchedulerOutput:
        """The requests to run, and those to pause first, out of all active ones."""


class SimpleScheduler(RequestScheduler):
    """Capacity first, then the micro batch."""

    def __init__(
        self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler
    ) -> None:
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler

    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> SchedulerOutput:
        """See the base class."""
        fitting, paused = self.capacity_scheduler.schedule_request(active_requests)
        contexts, generations = self.micro_batch_scheduler.schedule(fitting, inflight_request_ids)
        return SchedulerOutput(contexts, generations, paused, [], len(fitting))
