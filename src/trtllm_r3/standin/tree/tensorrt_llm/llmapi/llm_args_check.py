"""What stock takes and this engine cannot do: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..disaggregated_params import DisaggregatedParams
from ..sampling_params import SamplingParams
from .llm_configs import LoadFormat, MoeConfig, SamplerType

if TYPE_CHECKING:
    from .llm_args import TorchLlmArgs

_ENGINE: Mapping[str, tuple[Any, ...]] = {
    "backend": ("pytorch",),
    "revision": (None,),
    "tokenizer_revision": (None,),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "context_parallel_size": (1,),
    "moe_cluster_parallel_size": (None, -1, 1),
    "moe_tensor_parallel_size": (None, -1, 1),
    "moe_expert_parallel_size": (None, -1, 1),
    "enable_lm_head_tp_in_adp": (False,),
    "cp_config": (None, {}),
    "enable_lora": (False,),
    "lora_config": (None,),
    "guided_decoding_backend": (None,),
    "batched_logits_processor": (None,),
    "peft_cache_config": (None,),
    "cache_transceiver_config": (None,),
    "sparse_attention_config": (None,),
    "speculative_config": (None,),
    "max_beam_width": (None, 1),
    "num_postprocess_workers": (0,),
    "postprocess_tokenizer_dir": (None,),
    "attention_dp_config": (None,),
    "request_stats_max_iterations": (None,),
    "perf_metrics_max_requests": (0,),
    "enable_layerwise_nvtx_marker": (False,),
    "reasoning_parser": (None,),
    "orchestrator_type": (None,),
    "attn_backend": ("TRTLLM", "VANILLA"),
    "sampler_type": (SamplerType.auto, SamplerType.TorchSampler),
    "torch_compile_config": (None,),
    "load_format": (LoadFormat.AUTO,),
    "enable_min_latency": (False,),
    "force_dynamic_quantization": (False,),
    "checkpoint_loader": (None,),
    "checkpoint_format": ("HF",),
    "kv_connector_config": (None,),
    "mm_encoder_only": (False,),
    "ray_worker_extension_cls": (None,),
    "dtype": ("auto", "float32", "float16", "bfloat16"),
}
_KV_CACHE: Mapping[str, tuple[Any, ...]] = {
    "max_attention_window": (None,),
    "sink_token_length": (None, 0),
    "host_cache_size": (None, 0),
    "cross_kv_cache_fraction": (None,),
    "secondary_offload_min_priority": (None,),
    "event_buffer_max_size": (0,),
    "use_uvm": (False,),
    "max_gpu_total_bytes": (0,),
    "dtype": ("auto",),
}
_MOE: Mapping[str, tuple[Any, ...]] = {
    "backend": ("AUTO", "CUTLASS", "TRTLLM", "VANILLA"),
    "use_low_precision_moe_combine": (False,),
}
_SCHEDULER: Mapping[str, tuple[Any, ...]] = {"dynamic_batch_config": (None,)}
_REQUEST: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "embedding_bias": (None,),
    "logits_processor": (None,),
    "apply_batched_logits_processor": (False,),
    "bad": (None, []),
    "bad_token_ids": (None, []),
    "top_p_min": (None,),
    "top_p_reset_ids": (None,),
    "top_p_decay": (None, 1.0),
    "beam_search_diversity_rate": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "length_penalty": (None, 0.0),
    "early_stopping": (None, 1),
    "no_repeat_ngram_size": (None,),
    "min_p": (None, 0.0),
    "beam_width_array": (None,),
    "prompt_logprobs": (None, 0),
    "return_encoder_output": (False,),
    "exclude_input_from_output": (True,),
    "additional_model_outputs": (None, []),
    "lookahead_config": (None,),
    "guided_decoding": (None,),
}


def check_supported(llm_args: TorchLlmArgs) -> None:
    """Raise ValueError with the name and value of the first engine option that cannot be honoured."""
    _check(llm_args, _ENGINE, "")
    _check(llm_args.kv_cache_config, _KV_CACHE, "kv_cache_config.")
    _check(llm_args.moe_config, _MOE, "moe_config.")
    _check_load_balancer(llm_args.moe_config)
    _check(llm_args.scheduler_config, _SCHEDULER, "scheduler_config.")


def check_request_supported(sampling_params: SamplingParams, words_missing: bool = False) -> None:
    """Raise ValueError with the name and value of the first sampling option that cannot be honoured.

    `words_missing`: there are stop strings and nothing that could encode them.
    """
    _check(sampling_params, _REQUEST, "sampling_params.")
    if words_missing:
        raise ValueError(
            f"sampling_params.stop={sampling_params.stop!r} needs a tokenizer, stop_token_ids does not"
        )
    if sampling_params.best_of != sampling_params.n:
        raise ValueError(
            f"sampling_params.best_of={sampling_params.best_of} is not supported: only best_of == n "
            f"({sampling_params.n})"
        )


def check_request_options(disaggregated_params: DisaggregatedParams | None, **options: Any) -> None:
    """Raise ValueError with the name and value of the first argument of a request that cannot be honoured."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is not supported by this engine, only None")
    if disaggregated_params is not None and disaggregated_params.request_type != "context_and_generation":
        raise ValueError(
            f"disaggregated_params.request_type={disaggregated_params.request_type!r} is not supported "
            "by this engine, only 'context_and_generation'"
        )


def check_prompt_fits(llm_args: TorchLlmArgs, prompt_len: int) -> None:
    """Raise ValueError for a prompt that no step can take, or that exceeds a max_input_len that was set."""
    limit = llm_args.max_num_tokens
    if limit and prompt_len > limit and not llm_args.enable_chunked_prefill:
        raise ValueError(
            f"prompt of {prompt_len} tokens exceeds max_num_tokens ({limit}); "
            "enable_chunked_prefill=True splits it"
        )
    longest = llm_args.max_input_len
    if "max_input_len" in llm_args.model_fields_set and longest and prompt_len > longest:
        raise ValueError(f"prompt of {prompt_len} tokens exceeds max_input_len ({longest})")


def _check_load_balancer(moe_config: MoeConfig) -> None:
    balancer = moe_config.load_balancer
    if balancer is None:
        return
    if isinstance(balancer, str):
        raise ValueError(f"moe_config.load_balancer={balancer!r} is not supported, only a config object")
    if balancer.num_slots is None:
        raise ValueError("moe_config.load_balancer.num_slots=None is not supported, only a number")
    if moe_config.backend not in ("AUTO", "CUTLASS"):
        raise ValueError(
            f"moe_config.backend={moe_config.backend!r} is not supported with a load_balancer, "
            "only 'AUTO' or 'CUTLASS'"
        )


def _check(options: Any, allowed: Mapping[str, tuple[Any, ...]], prefix: str) -> None:
    for name, values in allowed.items():
        value = getattr(options, name)
        if not any(
            value is other
            or ((type(value) is type(other) or isinstance(value, (int, float, str))) and value == other)
            for other in values
        ):
            supported = " or ".join(repr(other) for other in values)
            raise ValueError(f"{prefix}{name}={value!r} is not supported by this engine, only {supported}")
