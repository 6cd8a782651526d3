"""The executor that a user's LLM talks to."""

from __future__ import annotations

import atexit
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

from .._utils import mpi_world_size
from ..disaggregated_params import DisaggregatedParams
from ..llmapi.llm_args import BaseLlmArgs
from ..llmapi.mpi_session import MpiSession, external_mpi_comm_available, need_spawn_mpi_workers
from ..llmapi.utils import enable_worker_single_process_for_tp1
from ..logger import logger
from ..sampling_params import LogprobParams, SamplingParams
from .postproc_worker import PostprocParams, PostprocWorkerConfig
from .request import GenerationRequest
from .result import GenerationResult, IterationResult
from .utils import RequestError

if TYPE_CHECKING:
    from .proxy import GenerationExecutorProxy
    from .worker import GenerationExecutorWorker


class IterationResultQueue:
    """Where the worker puts statistics."""

    is_initialized: bool = False
    queue: Any = None
    aqueue: Any = None


class GenerationExecutor(ABC):
    """Takes requests and gives futures. `create` decides where the engine runs."""

    def __init__(
        self,
        num_postprocess_workers: int = 0,
        postprocess_tokenizer_dir: str | None = None,
        is_llm_executor: bool | None = None,
    ) -> None:
        self.postproc_config = PostprocWorkerConfig(num_postprocess_workers, postprocess_tokenizer_dir)
        self.stats_queues = IterationResultQueue()
        self._error_queue: Queue[BaseException] = Queue()
        self.doing_shutdown = False
        self._last_client_id = 1
        self._is_llm_executor = is_llm_executor
        self._iter_stats_result: IterationResult | None = None
        self._results: dict[int, GenerationResult] = {}
        atexit.register(_shutdown_if_alive, weakref.ref(self))

    @abstractmethod
    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Start a request; its future."""

    @abstractmethod
    def abort_request(self, request_id: int) -> None:
        """Ask for an early end of a request."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine; requests in flight end as cancelled or fail."""

    def generate_async(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        query_token_ids: list[int] | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        postproc_params: PostprocParams | None = None,
        multimodal_params: Any = None,
        scheduling_params: Any = None,
        cache_salt_id: int | None = None,
        arrival_time: float | None = None,
    ) -> GenerationResult:
        """Start one prompt; its future."""
        assert isinstance(prompt_token_ids[0], int)
        assert isinstance(sampling_params, SamplingParams)
        self._maybe_initialize_iteration_results()
        return self.submit(
            GenerationRequest(
                prompt_token_ids,
                sampling_params=sampling_params,
                postproc_params=postproc_params,
                query_token_ids=query_token_ids,
                lora_request=lora_request,
                prompt_adapter_request=prompt_adapter_request,
                streaming=streaming,
                kv_cache_retention_config=kv_cache_retention_config,
                disaggregated_params=disaggregated_params,
                multimodal_params=multimodal_params,
                scheduling_params=scheduling_params,
                cache_salt_id=cache_salt_id,
                arrival_time=arrival_time,
            )
        )

    def generate(
        self,
        prompt_token_ids: list[int] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams],
    ) -> GenerationResult | list[GenerationResult]:
        """Run one prompt, or several, to the end."""
        unbatched = isinstance(prompt_token_ids[0], int)
        prompts: list[Any] = [prompt_token_ids] if unbatched else prompt_token_ids
        futures = [
            self.generate_async(
                prompt, sampling_params[index] if isinstance(sampling_params, list) else sampling_params
            )
            for index, prompt in enumerate(prompts)
        ]
        for future in futures:
            future.result()
        return futures[0] if unbatched else futures

    def _get_next_client_id(self) -> int:
        self._last_client_id = (self._last_client_id + 1) & ((1 << 64) - 1)
        return self._last_client_id

    def _get_logprob_params(self, request: GenerationRequest) -> LogprobParams | None:
        params = request.sampling_params
        if not (params.logprobs or params.prompt_logprobs):
            return None
        return LogprobParams(
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            drop_context_logits=not params._need_return_context_logits,
            drop_generation_logits=not params._need_return_generation_logits,
        )

    def _maybe_initialize_iteration_results(self) -> None:
        if not self._is_llm_executor:
            return
        if self._iter_stats_result is None:
            self._iter_stats_result = IterationResult()
        else:
            self._iter_stats_result.mark_undone()

    def _handle_background_error(self, error: BaseException | str | None = None) -> None:
        """Raise `error`, or else the first error of the background threads.

        A text or RequestError concerns one request; anything else ends the executor. For the user's thread.
        """
        if isinstance(error, str):
            raise RequestError(error)
        if error is not None:
            if not isinstance(error, RequestError):
                self.shutdown()
            raise error
        if not self._error_queue.empty():
            background_error = self._error_queue.get()
            self.shutdown()
            raise background_error

    def is_shutdown(self) -> bool:
        """Whether the executor has ended or is about to."""
        return self.doing_shutdown

    @property
    def enable_postprocess_parallel(self) -> bool:
        """Whether there are post-processing processes."""
        return self.postproc_config.enabled

    def get_stats(self, timeout: float | None) -> list[dict[str, Any]]:
        """Statistics of the iterations so far, waiting up to `timeout` seconds for more."""
        if self._iter_stats_result is None:
            return []
        self._iter_stats_result.set_timeout(timeout)
        return self._iter_stats_result.get_results()

    def aget_stats(self, timeout: float | None) -> IterationResult:
        """The same as an asynchronous iterator."""
        self._maybe_initialize_iteration_results()
        result = self._iter_stats_result or IterationResult()
        result.set_timeout(timeout)
        return result

    @staticmethod
    def _create_ipc_executor(
        worker_kwargs: dict[str, Any],
        model_world_size: int,
        mpi_session: MpiSession | None,
        postproc_worker_config: PostprocWorkerConfig,
        is_llm_executor: bool | None,
        use_worker: bool = False,
    ) -> GenerationExecutorProxy | GenerationExecutorWorker:
        if use_worker:
            from .worker import GenerationExecutorWorker

            return GenerationExecutorWorker(**worker_kwargs, is_llm_executor=is_llm_executor)
        from .proxy import GenerationExecutorProxy

        return GenerationExecutorProxy(
            worker_kwargs,
            model_world_size=model_world_size,
            mpi_session=mpi_session,
            postproc_worker_config=postproc_worker_config,
            is_llm_executor=is_llm_executor,
        )

    @staticmethod
    def create(
        engine: Path | None,
        executor_config: Any = None,
        batched_logits_processor: Any = None,
        model_world_size: int = 1,
        world_size: int = 0,
        mpi_session: MpiSession | None = None,
        reuse_mpi_comm: bool = False,
        return_logits: bool = False,
        postproc_worker_config: PostprocWorkerConfig | None = None,
        is_llm_executor: bool | None = None,
        hf_model_dir: Path | None = None,
        tokenizer: Any = None,
        llm_args: BaseLlmArgs | None = None,
    ) -> GenerationExecutorProxy | GenerationExecutorWorker:
        """Start the engine: here if logits are returned or TLLM_WORKER_USE_SINGLE_PROCESS=1, else in its own
        process. Raises what the engine's construction raises."""
        world_size = world_size or mpi_world_size()
        if 1 < world_size < model_world_size:
            raise RuntimeError(f"a model of {model_world_size} ranks cannot run on {world_size} ranks")
        worker_kwargs = {
            "engine": engine,
            "executor_config": executor_config,
            "batched_logits_processor": batched_logits_processor,
            "hf_model_dir": hf_model_dir,
            "tokenizer": tokenizer,
            "llm_args": llm_args,
        }
        spawn = need_spawn_mpi_workers(model_world_size)
        outside = external_mpi_comm_available(model_world_size) and reuse_mpi_comm
        use_worker = not (spawn or outside) and (return_logits or enable_worker_single_process_for_tp1())
        if use_worker:
            logger.warning("the engine runs in the caller's process, this may slow streaming down")
        return GenerationExecutor._create_ipc_executor(
            worker_kwargs,
            model_world_size=model_world_size,
            mpi_session=mpi_session,
            postproc_worker_config=postproc_worker_config or PostprocWorkerConfig(),
            is_llm_executor=is_llm_executor,
            use_worker=use_worker,
        )


def _shutdown_if_alive(reference: weakref.ref[GenerationExecutor]) -> None:
    executor = reference()
    if executor is not None:
        executor.shutdown()
