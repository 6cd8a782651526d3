"""The executor's request and its enums (stock: bound C++ classes)."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import torch


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class RequestType(enum.Enum):
    """Which half of a request this engine serves."""

    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    REQUEST_TYPE_CONTEXT_ONLY = 1
    REQUEST_TYPE_GENERATION_ONLY = 2


class CapacitySchedulerPolicy(enum.Enum):
    """How requests are admitted against the blocks of the KV cache."""

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(enum.Enum):
    """How the token budget of a step is dealt out to prompts."""

    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


@dataclass
class SamplingConfig:
    """How the next token is chosen. None means "not given"."""

    beam_width: int = 1
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None

    def __post_init__(self) -> None:
        if self.beam_width < 1:
            raise ValueError(f"beam_width must be at least 1, got {self.beam_width}")
        if self.num_return_sequences is not None and self.num_return_sequences < 1:
            raise ValueError(f"num_return_sequences must be at least 1, got {self.num_return_sequences}")


@dataclass
class AdditionalModelOutput:
    """Name of an output of the model to be returned with the result."""

    name: str
    gather_context: bool = False


@dataclass
class OutputConfig:
    """What a response carries besides tokens."""

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[AdditionalModelOutput] | None = None


@dataclass(eq=False)
class Request:
    """One request as the engine sees it.

    Takes further attributes (`py_*`), but pickling keeps the declared fields only, as the bound class does.
    ValueError for an empty prompt or `max_tokens < 1`.
    """

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = "batched"

    input_token_ids: list[int]
    max_tokens: int
    streaming: bool = False
    sampling_config: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    output_config: OutputConfig = dataclasses.field(default_factory=OutputConfig)
    end_id: int | None = None
    pad_id: int | None = None
    position_ids: list[int] | None = None
    bad_words: list[list[int]] | None = None
    stop_words: list[list[int]] | None = None
    embedding_bias: torch.Tensor | None = None
    lora_config: Any = None
    prompt_tuning_config: Any = None
    multimodal_input: Any = None
    multimodal_embedding: torch.Tensor | None = None
    mrope_config: Any = None
    lookahead_config: Any = None
    kv_cache_retention_config: Any = None
    logits_post_processor_name: str | None = None
    logits_post_processor: Any = None
    client_id: int | None = None
    return_all_generated_tokens: bool = False
    priority: float = 0.5
    type: RequestType = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
    context_phase_params: Any = None
    guided_decoding_params: Any = None
    cache_salt_id: int | None = None

    def __post_init__(self) -> None:
        if not self.input_token_ids:
            raise ValueError("input_token_ids is empty: a prompt needs at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
