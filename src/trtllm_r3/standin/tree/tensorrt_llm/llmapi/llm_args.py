"""All options of an engine, as one checked object that travels to the worker."""

from pathlib import Path
from typing import Any, Dict, Literal, Optional, Union

from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr, field_validator, model_validator

from .llm_configs import (
    AttentionDpConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    CudaGraphConfig,
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    DynamicBatchConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    LoadFormat,
    MoeConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplerType,
    SchedulerConfig,
    TorchCompileConfig,
    _ParallelConfig,
)
from .llm_eplb import MoeLoadBalancerConfig
from .llm_strict import StrictBaseModel
from .tokenizer import tokenizer_factory

__all__ = [
    "AttentionDpConfig",
    "BaseLlmArgs",
    "CapacitySchedulerPolicy",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DecodingBaseConfig",
    "DraftTargetDecodingConfig",
    "DynamicBatchConfig",
    "EagleDecodingConfig",
    "KvCacheConfig",
    "LlmArgs",
    "LoadFormat",
    "MTPDecodingConfig",
    "MoeConfig",
    "MoeLoadBalancerConfig",
    "NGramDecodingConfig",
    "SamplerType",
    "SchedulerConfig",
    "TorchCompileConfig",
    "TorchLlmArgs",
]


class BaseLlmArgs(StrictBaseModel):
    """Options that every backend has.

    What this engine cannot do is accepted here and refused when the model is built (`llm_args_check`).
    """

    model: Union[str, Path] = Field(description="Directory of the checkpoint.")
    tokenizer: Optional[Any] = Field(None, description="Path of a tokenizer, or a tokenizer.")
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = Field(False, description="Token ids only: no tokenizer is loaded.")
    trust_remote_code: bool = False
    tensor_parallel_size: PositiveInt = 1
    dtype: str = Field("auto", description="Dtype of the weights; auto takes the checkpoint's.")
    revision: Optional[str] = None
    tokenizer_revision: Optional[str] = None

    pipeline_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    gpus_per_node: Optional[PositiveInt] = None
    moe_cluster_parallel_size: Optional[int] = -1
    moe_tensor_parallel_size: Optional[int] = -1
    moe_expert_parallel_size: Optional[int] = -1
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    cp_config: Optional[Dict[str, Any]] = Field(default_factory=dict)
    fail_fast_on_attention_window_too_large: bool = False

    enable_lora: bool = False
    lora_config: Optional[Any] = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = Field(False, description="Split prompts over steps of max_num_tokens.")
    guided_decoding_backend: Optional[Literal["xgrammar", "llguidance"]] = None
    batched_logits_processor: Optional[Any] = None
    iter_stats_max_iterations: Optional[int] = None
    request_stats_max_iterations: Optional[int] = None
    peft_cache_config: Optional[Any] = None
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache_transceiver_config: Optional[Any] = None
    sparse_attention_config: Optional[Any] = None
    speculative_config: Optional[DecodingBaseConfig] = None

    max_batch_size: Optional[PositiveInt] = Field(2048, description="Most requests in a step.")
    max_input_len: Optional[PositiveInt] = Field(
        1024, description="Longest prompt; held only where it is set."
    )
    max_seq_len: Optional[PositiveInt] = Field(
        None, description="Longest prompt plus output; None: the model's."
    )
    max_beam_width: Optional[PositiveInt] = 1
    max_num_tokens: Optional[PositiveInt] = Field(8192, description="Most tokens in a step.")
    gather_generation_logits: bool = Field(False, description="Return logits; runs in the caller's process.")
    num_postprocess_workers: NonNegativeInt = 0
    postprocess_tokenizer_dir: Optional[str] = None
    reasoning_parser: Optional[str] = None
    mpi_session: Optional[Any] = Field(None, alias="_mpi_session", exclude=True)
    backend: Optional[str] = "pytorch"
    return_perf_metrics: bool = False
    orchestrator_type: Optional[Literal["rpc", "ray"]] = None
    env_overrides: Optional[Dict[str, str]] = Field(
        None, description="Environment of the process and its worker."
    )

    _parallel_config: Optional[_ParallelConfig] = PrivateAttr(default=None)

    @property
    def parallel_config(self) -> _ParallelConfig:
        """Sizes of the parallel groups."""
        assert self._parallel_config is not None
        return self._parallel_config

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "BaseLlmArgs":
        """The options of keyword arguments; pydantic's ValidationError (a ValueError) for a bad value."""
        return cls(**kwargs)

    def to_dict(self) -> Dict[str, Any]:
        """The options as JSON-ready values."""
        return self.model_dump(mode="json")

    def __getstate__(self) -> Dict[Any, Any]:
        state = super().__getstate__()
        return {**state, "__dict__": {**state["__dict__"], "mpi_session": None}}

    @model_validator(mode="after")
    def set_default_sizes(self) -> "BaseLlmArgs":
        """None means the default."""
        for name in ("max_batch_size", "max_input_len", "max_beam_width", "max_num_tokens"):
            if getattr(self, name) is None:
                self.__dict__[name] = type(self).model_fields[name].default
        return self

    @model_validator(mode="after")
    def validate_parallel_config(self) -> "BaseLlmArgs":
        """Collect the sizes of the parallel groups."""
        self._parallel_config = _ParallelConfig(
            tp_size=self.tensor_parallel_size,
            pp_size=self.pipeline_parallel_size,
            cp_size=self.context_parallel_size,
            gpus_per_node=self.gpus_per_node or 8,
            moe_cluster_size=_size(self.moe_cluster_parallel_size),
            moe_tp_size=_size(self.moe_tensor_parallel_size),
            moe_ep_size=_size(self.moe_expert_parallel_size),
            enable_attention_dp=self.enable_attention_dp,
        )
        return self

    @model_validator(mode="after")
    def validate_and_init_tokenizer(self) -> "BaseLlmArgs":
        """Load the tokenizer that was given, unless `skip_tokenizer_init`."""
        self.tokenizer = (
            None
            if self.skip_tokenizer_init
            else tokenizer_factory(
                self.tokenizer,
                trust_remote_code=self.trust_remote_code,
                use_fast=self.tokenizer_mode != "slow",
            )
        )
        return self


class TorchLlmArgs(BaseLlmArgs):
    """Options of the PyTorch backend."""

    garbage_collection_gen0_threshold: PositiveInt = 20000
    cuda_graph_config: Optional[CudaGraphConfig] = Field(
        default_factory=CudaGraphConfig, description="Recorded generation steps; None turns them off."
    )
    attention_dp_config: Optional[AttentionDpConfig] = None
    disable_overlap_scheduler: bool = Field(False, description="Read each step's tokens before the next one.")
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    attn_backend: str = "TRTLLM"
    sampler_type: Union[str, SamplerType] = SamplerType.auto
    enable_iter_perf_stats: bool = Field(
        False, description="Collect numbers of each iteration for get_stats."
    )
    enable_iter_req_stats: bool = False
    print_iter_log: bool = Field(False, description="Print a line for each iteration.")
    perf_metrics_max_requests: NonNegativeInt = 0
    batch_wait_timeout_ms: float = Field(0, ge=0)
    batch_wait_timeout_iters: NonNegativeInt = 0
    batch_wait_max_tokens_ratio: float = Field(0, ge=0, le=1)
    torch_compile_config: Optional[TorchCompileConfig] = None
    enable_autotuner: bool = True
    enable_layerwise_nvtx_marker: bool = False
    load_format: Union[str, LoadFormat] = LoadFormat.AUTO
    enable_min_latency: bool = False
    stream_interval: PositiveInt = Field(1, description="Iterations between responses of a streamed request.")
    force_dynamic_quantization: bool = False
    allreduce_strategy: Optional[
        Literal[
            "AUTO",
            "NCCL",
            "UB",
            "MINLATENCY",
            "ONESHOT",
            "TWOSHOT",
            "LOWPRECISION",
            "MNNVL",
            "NCCL_SYMMETRIC",
        ]
    ] = "AUTO"
    checkpoint_loader: Optional[Any] = None
    checkpoint_format: Optional[str] = None
    kv_connector_config: Optional[Any] = None
    mm_encoder_only: bool = False
    ray_worker_extension_cls: Optional[str] = None

    _extra_resource_managers: Dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def extra_resource_managers(self) -> Dict[str, Any]:
        """Resource managers to add to the engine's own, by key."""
        return self._extra_resource_managers

    @extra_resource_managers.setter
    def extra_resource_managers(self, value: Dict[str, Any]) -> None:
        self._extra_resource_managers = value

    @field_validator("backend", mode="before")
    @classmethod
    def init_backend(cls, value: Optional[str]) -> str:
        """The backend, "pytorch" where none is named."""
        return value or "pytorch"

    @field_validator("load_format", mode="before")
    @classmethod
    def convert_load_format(cls, value: Union[str, LoadFormat]) -> LoadFormat:
        """The member of a name; ValueError for an unknown one."""
        if isinstance(value, LoadFormat):
            return value
        if value.upper() not in LoadFormat.__members__:
            raise ValueError(f"load_format={value!r} is unknown, use one of {list(LoadFormat.__members__)}")
        return LoadFormat[value.upper()]

    @field_validator("sampler_type", mode="after")
    @classmethod
    def convert_sampler_type(cls, value: Union[str, SamplerType]) -> SamplerType:
        """The member of a name; ValueError for an unknown one."""
        return SamplerType(value)

    @model_validator(mode="after")
    def validate_checkpoint_format(self) -> "TorchLlmArgs":
        """Hugging Face checkpoints unless something else is asked for."""
        if self.checkpoint_format is None and self.checkpoint_loader is None:
            self.checkpoint_format = "HF"
        return self


def _size(value: Optional[int]) -> int:
    return -1 if value is None else value


LlmArgs = TorchLlmArgs
