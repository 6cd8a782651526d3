"""What travels from the proxy to the worker."""

from __future__ import annotations

from typing import Any

from ..disaggregated_params import DisaggregatedParams
from ..sampling_params import SamplingParams


class GenerationRequest:
    """A prompt and what to do with it. Further attributes travel too. TypeError if it is not a list."""

    def __init__(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        query_token_ids: list[int] | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        postproc_params: Any = None,
        multimodal_params: Any = None,
        scheduling_params: Any = None,
        cache_salt_id: int | None = None,
        arrival_time: float | None = None,
    ) -> None:
        if not isinstance(prompt_token_ids, list):
            raise TypeError(f"prompt_token_ids must be a list of ints, got {type(prompt_token_ids)}")
        self.prompt_token_ids = prompt_token_ids
        self.query_token_ids = query_token_ids
        self.sampling_params = sampling_params
        self.postproc_params = postproc_params
        self.lora_request = lora_request
        self.prompt_adapter_request = prompt_adapter_request
        self.streaming = streaming
        self.multimodal_params = multimodal_params
        self.kv_cache_retention_config = kv_cache_retention_config
        self.id: int | None = None
        self.disaggregated_params = disaggregated_params
        self.scheduling_params = scheduling_params
        self.cache_salt_id = cache_salt_id
        self.arrival_time = arrival_time

    def set_id(self, id: int) -> GenerationRequest:
        """Give the request its number, once."""
        assert self.id is None, f"request id is already set: {self.id}"
        self.id = id
        return self


class CancellingRequest:
    """Asks the worker to end a request early."""

    def __init__(self, id: int) -> None:
        self.id = id
