"""The worker: owns the engine, feeds it requests and sends its responses on."""

from __future__ import annotations

import datetime as dt
import json
import weakref
from pathlib import Path
from typing import Any

from .._utils import global_mpi_rank, mpi_rank
from ..bindings import executor as tllm
from ..llmapi.llm_args import TorchLlmArgs
from ..logger import logger
from .await_response import AwaitResponseHelper
from .executor import GenerationExecutor, IterationResultQueue
from .ipc import FusedIpcQueue
from .postproc_worker import PostprocWorkerConfig
from .request import GenerationRequest
from .result import GenerationResult
from .utils import ErrorResponse, RequestError

__all__ = ["AwaitResponseHelper", "BaseWorker"]


class BaseWorker(GenerationExecutor):
    """An executor with the engine in this process."""

    class WorkerExit(GeneratorExit):
        """Leaves a `with worker:` block without an error."""

    def __init__(
        self,
        engine: Path | None,
        executor_config: Any = None,
        batched_logits_processor: Any = None,
        postproc_worker_config: PostprocWorkerConfig | None = None,
        is_llm_executor: bool | None = None,
        hf_model_dir: Path | None = None,
        tokenizer: Any = None,
        llm_args: TorchLlmArgs | None = None,
    ) -> None:
        config = postproc_worker_config or PostprocWorkerConfig()
        super().__init__(config.num_postprocess_workers, config.postprocess_tokenizer_dir, is_llm_executor)
        self._engine = engine
        self._executor_config = executor_config
        self._batched_logits_processor = batched_logits_processor
        self._hf_model_dir = hf_model_dir
        self._tokenizer = tokenizer
        if llm_args is None:
            raise ValueError("llm_args is required: only the PyTorch backend exists here")
        self.llm_args = llm_args
        self.engine: Any = None
        self.max_seq_len: int | None = llm_args.max_seq_len
        self.result_queue: FusedIpcQueue | None = None
        self.rank, self.global_rank = mpi_rank(), global_mpi_rank()
        self._client_id_to_request_id: dict[int, int] = {}
        self._await_response_helper = AwaitResponseHelper(weakref.proxy(self))
        self._is_pytorch_backend = llm_args.backend == "pytorch"

    def setup_engine(self) -> None:
        """Build the engine and start its loop."""
        from .._torch.pyexecutor.py_executor_creator import create_py_executor

        self.mapping = self.llm_args.parallel_config.to_mapping()
        self.engine = create_py_executor(
            llm_args=self.llm_args,
            checkpoint_dir=None if self._hf_model_dir is None else str(self._hf_model_dir),
            tokenizer=self._tokenizer,
        )
        if getattr(self.engine, "max_seq_len", None) is not None:
            self.max_seq_len = self.engine.max_seq_len

    def await_responses(self, timeout: float | None = None) -> list[Any]:
        """Responses that are ready, waiting up to `timeout` seconds for the first."""
        delta = None if timeout is None else dt.timedelta(seconds=timeout)
        return list(self.engine.await_responses(timeout=delta))

    def fetch_stats(self) -> list[Any]:
        """Statistics of the iterations since the last call."""
        return list(self.engine.get_latest_iteration_stats())

    def set_result_queue(self, queue: FusedIpcQueue) -> None:
        """Send all responses to the proxy through this queue."""
        self.result_queue = queue

    def _set_iteration_result_queue(self, it_result_queue: IterationResultQueue, queue: Any) -> None:
        it_result_queue.is_initialized = True
        it_result_queue.queue, it_result_queue.aqueue = queue, None

    def return_queue(self, client_id: int) -> Any:
        """Where the responses of a request go; None if nobody waits for them any more."""
        if self.result_queue is not None:
            return self.result_queue
        result = self._results.get(client_id)
        return None if result is None else result.queue

    def start(self) -> None:
        """Start the threads that move responses."""

    def abort_request(self, client_id: int) -> None:
        """Cancel a request in the engine; nothing happens if it has ended."""
        request_id = self._client_id_to_request_id.get(client_id)
        if request_id is None:
            logger.debug(f"request of client id {client_id} has ended, cannot abort it")
        elif self.engine is not None and self.engine.can_enqueue_requests():
            self.engine.cancel_request(request_id)

    def _engine_response_callback(self, response: Any) -> Any:
        return response

    def _has_background_error(self) -> bool:
        return not self._error_queue.empty()

    def _create_error_response(self, response: Any) -> ErrorResponse:
        return ErrorResponse(response.client_id, str(self._error_queue.get_nowait()), response.request_id)

    def _deduce_max_tokens(self, request: GenerationRequest) -> int:
        """The user's max_tokens, cut to what is left of max_seq_len; ValueError if nothing is left."""
        wanted = request.sampling_params.max_tokens
        if self.max_seq_len is None:
            if wanted is None:
                raise ValueError("max_tokens must be set where max_seq_len is not known")
            return wanted
        room = self.max_seq_len - len(request.prompt_token_ids)
        if room < 1:
            raise ValueError(
                f"prompt of {len(request.prompt_token_ids)} tokens leaves no room for output within "
                f"max_seq_len ({self.max_seq_len})"
            )
        if wanted is not None and wanted > room:
            logger.warning(f"max_tokens ({wanted}) is cut to {room}: max_seq_len is {self.max_seq_len}")
        return room if wanted is None else min(wanted, room)

    def _enqueue_request(self, request: GenerationRequest, result_wait_queue: Any = None) -> int:
        """Hand a request to the engine; its number there. RequestError if the engine does not take it."""
        assert request.id is not None
        try:
            executor_request = self._to_executor_request(request)
            options = {} if result_wait_queue is None else {"result_wait_queue": result_wait_queue}
            return int(self.engine.enqueue_request(executor_request, **options))
        except Exception as error:
            raise RequestError(str(error)) from error

    def _to_executor_request(self, request: GenerationRequest) -> tllm.Request:
        params = request.sampling_params
        executor_request = tllm.Request(
            client_id=request.id,
            input_token_ids=list(request.prompt_token_ids),
            max_tokens=self._deduce_max_tokens(request),
            streaming=request.streaming,
            sampling_config=params._get_sampling_config(),
            end_id=-1 if params.ignore_eos else params.end_id,
            pad_id=params.pad_id,
            output_config=params._get_output_config(is_pytorch_backend=self._is_pytorch_backend),
            return_all_generated_tokens=False,
            bad_words=params._get_bad_words(),
            stop_words=params._get_stop_words(),
            embedding_bias=params.embedding_bias,
            cache_salt_id=request.cache_salt_id,
        )
        extras = {
            "py_num_logprobs": params.logprobs,
            "py_lora_path": None,
            "py_scheduling_params": request.scheduling_params,
        }
        if request.arrival_time is not None:
            extras["py_arrival_time"] = request.arrival_time
        for name, value in extras.items():
            setattr(executor_request, name, value)
        return executor_request

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Start a request; its future. RequestError if the engine does not take it."""
        self._handle_background_error()
        self.start()
        if self.rank != 0:
            raise RuntimeError(
                "only rank 0 can submit requests: guard the script's entry with `if __name__ == '__main__':`"
            )
        if request.id is None:
            request.set_id(self._get_next_client_id())
        assert request.id is not None
        result = GenerationResult(
            request,
            background_error_handler=self._handle_background_error,
            executor=self,
            disaggregated_params=request.disaggregated_params,
            logprob_params=self._get_logprob_params(request),
        )
        self._results[request.id] = result
        try:
            request_id = self._enqueue_request(request)
        except RequestError:
            self._pop_result(request.id)
            raise
        self._client_id_to_request_id[request.id] = request_id
        if request.id not in self._results:
            self._client_id_to_request_id.pop(request.id)
        self._handle_background_error()
        return result

    def _pop_result(self, client_id: int) -> None:
        self._results.pop(client_id, None)
        self._client_id_to_request_id.pop(client_id, None)

    @staticmethod
    def _stats_serializer(stats: Any) -> str:
        return stats if isinstance(stats, str) else json.dumps(stats)

    def shutdown(self) -> None:
        """End the engine."""
        if self.doing_shutdown:
            return
        self.doing_shutdown = True
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None

    def __enter__(self) -> BaseWorker:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc_value: object, traceback: object) -> bool:
        self.shutdown()
        return exc_type is None or exc_type is self.WorkerExit

    def __del__(self) -> None:
        try:
            self.shutdown()
        except Exception as error:
            logger.error(f"while the worker was shut down: {error!r}")
