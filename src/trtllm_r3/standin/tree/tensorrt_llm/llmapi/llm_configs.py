"""The option groups of an engine. They are imported from `llmapi` or `llmapi.llm_args`."""

import enum
import math
from dataclasses import dataclass
from typing import List, Literal, Optional, Union

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from ..bindings import executor as tllme
from ..mapping import Mapping
from .llm_eplb import MoeLoadBalancerConfig
from .llm_strict import StrictBaseModel


class CapacitySchedulerPolicy(str, enum.Enum):
    """How requests are admitted against the KV cache's blocks."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"

    def _to_pybind(self) -> tllme.CapacitySchedulerPolicy:
        return tllme.CapacitySchedulerPolicy[self.value]


class ContextChunkingPolicy(str, enum.Enum):
    """How a step's token budget is dealt out to prompts."""

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"

    def _to_pybind(self) -> tllme.ContextChunkingPolicy:
        return tllme.ContextChunkingPolicy[self.value]


class DynamicBatchConfig(StrictBaseModel):
    """Tuning of the batch limits at run time."""

    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: int


class SchedulerConfig(StrictBaseModel):
    """How requests are scheduled."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: Optional[ContextChunkingPolicy] = None
    dynamic_batch_config: Optional[DynamicBatchConfig] = None


class CudaGraphConfig(StrictBaseModel):
    """Batch sizes of the recorded generation graphs.

    Given `batch_sizes`, `max_batch_size` is their maximum; given `max_batch_size` (default 128), the sizes
    are made from it. With `enable_padding` a batch is rounded up to the next size.
    """

    batch_sizes: Optional[List[int]] = None
    max_batch_size: NonNegativeInt = 0
    enable_padding: bool = False

    @model_validator(mode="after")
    def validate_cuda_graph_config(self) -> "CudaGraphConfig":
        """Fill in what was not given; ValueError where both were and differ."""
        if not self.batch_sizes:
            self.max_batch_size = self.max_batch_size or 128
            self.batch_sizes = self._generate_cuda_graph_batch_sizes(self.max_batch_size, self.enable_padding)
            return self
        self.batch_sizes = sorted(self.batch_sizes)
        largest = self.batch_sizes[-1]
        if self.batch_sizes[0] < 1:
            raise ValueError(f"cuda_graph_config.batch_sizes must be positive, got {self.batch_sizes}")
        if self.max_batch_size not in (0, largest):
            raise ValueError(
                f"cuda_graph_config.max_batch_size ({self.max_batch_size}) must equal the maximum of "
                f"cuda_graph_config.batch_sizes ({largest}) when both are given"
            )
        self.max_batch_size = largest
        return self

    @staticmethod
    def _generate_cuda_graph_batch_sizes(max_batch_size: int, enable_padding: bool) -> List[int]:
        """Sizes up to the maximum: every eighth with padding, else every one up to 32; then powers of two."""
        sizes = [1, 2, 4, *range(8, 129, 8)] if enable_padding else [*range(1, 33), 64, 128]
        sizes += [2**power for power in range(8, math.ceil(math.log2(max_batch_size)))]
        return [size for size in sizes if size < max_batch_size] + [max_batch_size]


class MoeConfig(StrictBaseModel):
    """The mixture-of-experts layers."""

    backend: Literal["AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"] = (
        "AUTO"
    )
    max_num_tokens: Optional[PositiveInt] = None
    load_balancer: Optional[Union[str, MoeLoadBalancerConfig]] = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class AttentionDpConfig(StrictBaseModel):
    """Balancing of requests over ranks that attend to requests of their own."""

    enable_balance: bool = False
    timeout_iters: NonNegativeInt = 50
    batching_wait_iters: NonNegativeInt = 10


class TorchCompileConfig(StrictBaseModel):
    """Compilation of the model."""

    enable_fullgraph: bool = True
    enable_inductor: bool = False
    enable_piecewise_cuda_graph: bool = False
    capture_num_tokens: Optional[List[int]] = None
    enable_userbuffers: bool = True
    max_num_streams: PositiveInt = 1


class KvCacheConfig(StrictBaseModel):
    """The KV cache: size, block size and reuse of blocks."""

    enable_block_reuse: bool = True
    max_tokens: Optional[PositiveInt] = None
    max_attention_window: Optional[List[PositiveInt]] = None
    sink_token_length: Optional[int] = None
    free_gpu_memory_fraction: Optional[float] = Field(default=0.9, ge=0, le=1)
    host_cache_size: Optional[int] = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: Optional[float] = None
    secondary_offload_min_priority: Optional[int] = None
    event_buffer_max_size: NonNegativeInt = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: NonNegativeInt = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    tokens_per_block: PositiveInt = 32


class DecodingBaseConfig(StrictBaseModel):
    """Speculative decoding: what all kinds have in common."""

    max_draft_len: Optional[int] = None
    speculative_model_dir: Optional[str] = None


class DraftTargetDecodingConfig(DecodingBaseConfig):
    """Drafts from a smaller model."""


class EagleDecodingConfig(DecodingBaseConfig):
    """Drafts from an EAGLE head."""

    eagle3_one_model: Optional[bool] = True


class MTPDecodingConfig(DecodingBaseConfig):
    """Drafts from the model's own multi-token prediction layers."""

    num_nextn_predict_layers: int = 1


class NGramDecodingConfig(DecodingBaseConfig):
    """Drafts from n-grams of the text so far."""

    max_matching_ngram_size: int = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True


class SamplerType(str, enum.Enum):
    """Which sampler chooses tokens."""

    auto = "auto"
    TRTLLMSampler = "TRTLLMSampler"
    TorchSampler = "TorchSampler"


class LoadFormat(enum.Enum):
    """Where weights come from."""

    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2


@dataclass
class _ParallelConfig:
    """Sizes of the parallel groups."""

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    gpus_per_node: int = 8
    moe_cluster_size: int = -1
    moe_tp_size: int = -1
    moe_ep_size: int = -1
    enable_attention_dp: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def is_multi_gpu(self) -> bool:
        """Whether there is more than one rank."""
        return self.world_size > 1

    def to_mapping(self, rank: int = 0) -> Mapping:
        """The mapping of one rank."""
        return Mapping(
            self.world_size,
            rank,
            self.gpus_per_node,
            cp_size=self.cp_size,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            moe_cluster_size=self.moe_cluster_size,
            moe_tp_size=self.moe_tp_size,
            moe_ep_size=self.moe_ep_size,
            enable_attention_dp=self.enable_attention_dp,
        )
