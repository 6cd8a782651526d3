"""The LLM API: what users import."""

from ..disaggregated_params import DisaggregatedParams
from ..executor import CompletionOutput, RequestError
from ..sampling_params import GuidedDecodingParams, SamplingParams
from .llm import LLM, RequestOutput
from .llm_args import (
    AttentionDpConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    CudaGraphConfig,
    DraftTargetDecodingConfig,
    DynamicBatchConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    LlmArgs,
    MoeConfig,
    MoeLoadBalancerConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SchedulerConfig,
    TorchCompileConfig,
    TorchLlmArgs,
)

__all__ = [
    "LLM",
    "AttentionDpConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "DraftTargetDecodingConfig",
    "DynamicBatchConfig",
    "EagleDecodingConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LlmArgs",
    "MTPDecodingConfig",
    "MoeConfig",
    "MoeLoadBalancerConfig",
    "NGramDecodingConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TorchCompileConfig",
    "TorchLlmArgs",
]
