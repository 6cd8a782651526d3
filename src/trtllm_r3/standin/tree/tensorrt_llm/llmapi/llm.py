"""The LLM class: prompts in, outputs out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from .._utils import steady_clock_now
from ..disaggregated_params import DisaggregatedParams
from ..executor import GenerationExecutor, IterationResult, PostprocParams
from ..inputs import PromptInputs, create_input_processor, get_cache_salt_id, prompt_inputs
from ..logger import logger
from ..sampling_params import SamplingParams
from .llm_args import TorchLlmArgs
from .llm_args_check import check_prompt_fits, check_request_options, check_request_supported, check_supported
from .llm_utils import ClosedAtExit, item_at, load_json, needs_words
from .mpi_session import MpiSession
from .progress import progress
from .request_output import RequestOutput
from .tokenizer import TokenizerBase, load_hf_tokenizer

__all__ = ["LLM", "BaseLLM", "RequestOutput"]


class BaseLLM(ClosedAtExit):
    """An engine and the way to it. ValueError for unknown options and those that cannot be honoured."""

    args: Any = None
    mpi_session: MpiSession | None = None
    _executor: Any = None
    _tokenizer: TokenizerBase | None = None
    _hf_model_dir: Path | None = None
    _hf_model_config: SimpleNamespace | None = None
    _generation_config: SimpleNamespace | None = None

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: Literal["auto", "slow"] = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._executor_cls = kwargs.pop("executor_cls", GenerationExecutor)
        kwargs |= {
            "model": model,
            "tokenizer": tokenizer,
            "tokenizer_mode": tokenizer_mode,
            "skip_tokenizer_init": skip_tokenizer_init,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "revision": revision,
            "tokenizer_revision": tokenizer_revision,
        }
        self.args = self._parse_args(kwargs)
        self.mpi_session = self.args.mpi_session
        self.input_processor = create_input_processor(None, None)
        try:
            self._build_model()
        except Exception:
            if self.mpi_session is not None:
                self.mpi_session.shutdown()
            raise
        self._close_at_exit()

    def _parse_args(self, options: dict[str, Any]) -> Any:
        """The options as one object; sets the environment that they ask for."""
        for name in options:
            if name not in {*TorchLlmArgs.model_fields, "_mpi_session", "backend"}:
                raise ValueError(f"{type(self).__name__} got invalid argument: {name}")
        args = TorchLlmArgs.from_kwargs(**options)
        if args.env_overrides:
            os.environ.update(args.env_overrides)
        return args

    def generate(
        self,
        inputs: PromptInputs | Sequence[PromptInputs],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | list[DisaggregatedParams] | None = None,
        scheduling_params: Any = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Run one prompt, or a list of prompts, to the end.

        A prompt is a text, a list of token ids, or a dictionary with "prompt" or "prompt_token_ids". Every
        other argument may be a list, one entry for each prompt. RequestError if a request fails.
        """
        unbatched = not isinstance(inputs, list) or (len(inputs) > 0 and isinstance(inputs[0], int))
        batch: list[Any] = [inputs] if unbatched else list(inputs)
        prompts = [prompt_inputs(prompt) for prompt in batch]
        options = {
            "sampling_params": sampling_params,
            "lora_request": lora_request,
            "prompt_adapter_request": prompt_adapter_request,
            "kv_cache_retention_config": kv_cache_retention_config,
            "disaggregated_params": disaggregated_params,
            "scheduling_params": scheduling_params,
            "cache_salt": cache_salt,
        }
        each = [item_at(options, i) for i in range(len(prompts))]
        futures = [
            self.generate_async(prompt, streaming=False, **own)
            for prompt, own in zip(prompts, each, strict=True)
        ]
        for future in progress(futures, "Processed requests", use_tqdm):
            future.result()
        return futures[0] if unbatched else futures

    def generate_async(
        self,
        inputs: PromptInputs,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        _postproc_params: PostprocParams | None = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Start one prompt; its future, to be waited for, awaited, or iterated if `streaming`.

        ValueError for a bad prompt or an option that cannot be honoured, naming it.
        """
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        check_request_options(
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            kv_cache_retention_config=kv_cache_retention_config,
            _postproc_params=_postproc_params,
            scheduling_params=scheduling_params,
            disaggregated_params=disaggregated_params,
        )
        arrival_time = steady_clock_now() if self.args.return_perf_metrics else None
        sampling_params = self._prepare_sampling_params(sampling_params)
        prompt, prompt_token_ids = self._tokenize(inputs, sampling_params)
        self._check_arguments(len(prompt_token_ids), 0, sampling_params, is_gen_only=False)
        result = self._executor.generate_async(
            prompt_token_ids,
            sampling_params=sampling_params,
            streaming=streaming,
            disaggregated_params=disaggregated_params,
            cache_salt_id=None if cache_salt is None else get_cache_salt_id(cache_salt),
            arrival_time=arrival_time,
        )
        return RequestOutput._from_generation_result(result, prompt, self.tokenizer)

    def _tokenize(
        self, inputs: PromptInputs, sampling_params: SamplingParams
    ) -> tuple[str | None, list[int]]:
        prompt = prompt_inputs(inputs)
        token_ids = prompt.get("prompt_token_ids")
        if isinstance(token_ids, list):
            return None, token_ids
        text = prompt["prompt"]
        assert text is not None
        token_ids, _ = self.input_processor({"prompt": text}, sampling_params)
        return text, token_ids

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Numbers of the iterations so far (`enable_iter_perf_stats`), after prompts were submitted."""
        return list(self._executor.get_stats(timeout=timeout))

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        """The same as an asynchronous iterator."""
        result: IterationResult = self._executor.aget_stats(timeout=timeout)
        return result

    def _prepare_sampling_params(self, sampling_params: SamplingParams | None = None) -> SamplingParams:
        """The user's own object, completed in place: end id, stop words, stream interval."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams or None, got {type(params)}")
        if params.end_id is None:
            if self.tokenizer is None:
                raise ValueError(
                    "end_id must be given in sampling_params where there is no tokenizer to take it from"
                )
            params._setup(self.tokenizer, self._hf_model_config, self._generation_config)
        elif self.tokenizer is not None and needs_words(params):
            params._setup(self.tokenizer, self._hf_model_config, self._generation_config)
        if params._stream_interval is None:
            params._stream_interval = getattr(self.args, "stream_interval", 1)
        params.return_perf_metrics = params.return_perf_metrics or self.args.return_perf_metrics
        return params

    def _check_arguments(
        self, prompt_len: int, query_len: int, sampling_params: SamplingParams, is_gen_only: bool
    ) -> None:
        """Refuse this request alone: options that cannot be honoured, prompts that do not fit in a step."""
        check_request_supported(sampling_params, needs_words(sampling_params))
        if not is_gen_only:
            check_prompt_fits(self.args, prompt_len + query_len)

    def _build_model(self) -> None:
        """Find the checkpoint; subclasses start the engine."""
        check_supported(self.args)
        model_dir = Path(self.args.model)
        if not (model_dir / "config.json").is_file():
            raise ValueError(f"model={str(self.args.model)!r} is not a directory with a config.json")
        self._hf_model_dir = model_dir

    def _try_load_tokenizer(self) -> TokenizerBase | None:
        if self.args.skip_tokenizer_init:
            return None
        if self.args.tokenizer is not None:
            tokenizer: TokenizerBase = self.args.tokenizer
            return tokenizer
        return load_hf_tokenizer(
            self.args.model,
            trust_remote_code=self.args.trust_remote_code,
            use_fast=self.args.tokenizer_mode != "slow",
        )

    @property
    def tokenizer(self) -> TokenizerBase | None:
        """The tokenizer, if there is one."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: TokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self.input_processor.tokenizer = tokenizer

    def shutdown(self) -> None:
        """End the engine and its process. Requests in flight are cancelled."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
        session, self.mpi_session = self.mpi_session, None
        if session is not None:
            session.shutdown()


class _TorchLLM(BaseLLM):
    """An LLM on the PyTorch backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"backend": "pytorch", **kwargs})

    def _collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        """Call a worker's method on all ranks; only some executors can, ValueError for the others."""
        if not hasattr(self._executor, "collective_rpc"):
            raise ValueError(f"Executor type {type(self._executor)} does not support collective RPC.")
        return list(self._executor.collective_rpc(method, args, kwargs, non_block, unique_reply_rank))

    def _build_model(self) -> None:
        super()._build_model()
        self._tokenizer = self._try_load_tokenizer()
        self._hf_model_config = load_json(self._hf_model_dir, "config.json")
        self._generation_config = load_json(self._hf_model_dir, "generation_config.json")
        self.input_processor = create_input_processor(
            self._hf_model_dir, self._tokenizer, self.args.checkpoint_format
        )
        self._executor = self._executor_cls.create(
            None,
            executor_config=None,
            batched_logits_processor=self.args.batched_logits_processor,
            model_world_size=self.args.parallel_config.world_size,
            mpi_session=self.mpi_session,
            return_logits=self.args.gather_generation_logits,
            is_llm_executor=True,
            hf_model_dir=self._hf_model_dir,
            tokenizer=self.tokenizer,
            llm_args=self.args,
        )
        logger.info(f"engine of {self._hf_model_dir} is ready")


class LLM(_TorchLLM):
    """A model, ready to generate.

    `LLM(model="dir")` loads a Hugging Face checkpoint; further keyword arguments are the fields of
    `TorchLlmArgs`. Use it as a context manager, or call `shutdown()`.
    """
