"""The worker with its threads, and the main function of a worker process."""

from __future__ import annotations

import gc
import os
import pickle
import time
import traceback
from pathlib import Path
from typing import Any

from .._utils import mpi_comm, mpi_rank
from ..llmapi.llm_args import TorchLlmArgs
from ..llmapi.utils import AsyncQueue, ManagedThread, logger_debug, print_traceback_on_error
from ..logger import logger
from .base_worker import BaseWorker
from .ipc import FusedIpcQueue, IpcQueue
from .postproc_worker import PostprocWorkerConfig
from .request import CancellingRequest, GenerationRequest
from .utils import ErrorResponse, RequestError, WorkerCommIpcAddrs

__all__ = ["GenerationExecutorWorker", "worker_main"]

_CANCEL_GRACE_S = 5.0


class GenerationExecutorWorker(BaseWorker):
    """A worker with one thread for responses and one for statistics."""

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
        super().__init__(
            engine=engine,
            executor_config=executor_config,
            batched_logits_processor=batched_logits_processor,
            postproc_worker_config=postproc_worker_config,
            is_llm_executor=is_llm_executor,
            hf_model_dir=hf_model_dir,
            tokenizer=tokenizer,
            llm_args=llm_args,
        )
        self.await_response_thread = ManagedThread(
            self.await_response_task, error_queue=self._error_queue, name="await_response_thread"
        )
        self.dispatch_stats_thread = ManagedThread(
            self.dispatch_stats_task, error_queue=self._error_queue, name="dispatch_stats_thread"
        )
        self.setup_engine()

    def start_thread(self, thread: ManagedThread) -> None:
        """Start a thread that was not started yet, if the engine lives."""
        if thread.ident is None and self.engine.can_enqueue_requests():
            thread.start()

    def await_response_task(self) -> bool:
        """One turn of the response thread."""
        return self._await_response_helper()

    def dispatch_stats_task(self) -> bool:
        """One turn of the statistics thread."""
        time.sleep(0.2)
        stats = [self._stats_serializer(item) for item in self.fetch_stats()]
        queue = self.stats_queues.queue
        if queue is None and self._iter_stats_result is not None:
            queue = self._iter_stats_result.queue
        try:
            for item in stats if queue is not None else []:
                queue.put(item)
        except AsyncQueue.EventLoopShutdownError:
            logger.debug("statistics for an asyncio loop that has ended")
        return True

    def start(self) -> None:
        """Start the threads."""
        self.start_thread(self.await_response_thread)
        if self.llm_args.enable_iter_perf_stats and mpi_rank() == 0:
            self.start_thread(self.dispatch_stats_thread)

    def shutdown(self) -> None:
        """Stop the threads, then the engine; raises an error that nobody was told of."""
        if self.doing_shutdown:
            return
        self.doing_shutdown = True
        if self.engine is None:
            return
        self._cancel_pending()
        for thread in (self.await_response_thread, self.dispatch_stats_thread):
            if thread.is_alive():
                thread.stop()
                thread.join()
        self.engine.shutdown()
        self._fail_pending()
        self.engine = None
        self._handle_background_error()

    def _cancel_pending(self) -> None:
        """Cancel all requests and give the engine a moment to say so."""
        for client_id in list(self._results):
            self.abort_request(client_id)
        deadline = time.monotonic() + _CANCEL_GRACE_S
        while self._results and self.await_response_thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _fail_pending(self) -> None:
        """Answer the requests that the engine left behind with an error."""
        left = [
            ErrorResponse(client_id, RequestError("the engine was shut down"), client_id)
            for client_id in list(self._results)
        ]
        self._await_response_helper.responses_handler(left)

    def block_subordinates(self) -> None:
        """Keep ranks other than 0 waiting for the engine's end."""
        if self.rank != 0:
            self.engine.wait_shutdown()


@print_traceback_on_error
def worker_main(
    engine: Path | None,
    worker_queues: WorkerCommIpcAddrs,
    log_level: str,
    executor_config: Any = None,
    batched_logits_processor: Any = None,
    worker_cls: type[GenerationExecutorWorker] = GenerationExecutorWorker,
    tracer_init_kwargs: dict[str, Any] | None = None,
    _torch_model_class_mapping: dict[str, Any] | None = None,
    postproc_worker_config: PostprocWorkerConfig | None = None,
    ready_signal: bytes | None = None,
    is_llm_executor: bool | None = True,
    hf_model_dir: Path | None = None,
    tokenizer: Any = None,
    llm_args: TorchLlmArgs | None = None,
) -> None:
    """Build a worker and serve the proxy's requests until it sends None or hangs up.

    An error while the engine is built goes to the proxy through the status queue. Errors of one request go
    back as responses; any other error ends the process's task and reaches the proxy through its future.
    """
    del tracer_init_kwargs
    mpi_comm().barrier()
    _prepare_process(log_level, _torch_model_class_mapping, llm_args)
    queues = _Queues(worker_queues)
    mpi_comm().barrier()
    what = (engine, executor_config, batched_logits_processor, postproc_worker_config)
    try:
        worker = worker_cls(*what, is_llm_executor, hf_model_dir, tokenizer, llm_args)
    except Exception as error:
        logger.error(f"failed to initialize the executor on rank {mpi_rank()}: {traceback.format_exc()}")
        queues.init_status.put((_picklable(error), traceback.format_exc()))
        return
    with worker:
        try:
            worker.block_subordinates()
            worker.set_result_queue(queues.results)
            worker._set_iteration_result_queue(worker.stats_queues, queues.stats)
            queues.init_status.put((ready_signal, None))
            _serve(worker, queues.requests)
        finally:
            queues.tell_proxy_to_quit(worker)


def _prepare_process(
    log_level: str, model_classes: dict[str, Any] | None, llm_args: TorchLlmArgs | None
) -> None:
    """Environment, log level, garbage collection, and the caller's own model classes."""
    if llm_args is not None and llm_args.env_overrides:
        os.environ.update(llm_args.env_overrides)
    logger.set_level(log_level)
    logger_debug(f"Worker {mpi_rank()} entering worker_main...")
    if model_classes:
        from .._torch.models.modeling_utils import MODEL_CLASS_MAPPING

        MODEL_CLASS_MAPPING.update(model_classes)
    if os.getenv("TRTLLM_WORKER_DISABLE_GC", "0") == "1":
        gc.disable()


class _Queues:
    """The worker's ends of the queues."""

    def __init__(self, addresses: WorkerCommIpcAddrs) -> None:
        self.requests = IpcQueue(addresses.request_queue_addr, is_server=False, name="worker_request_queue")
        self.init_status = IpcQueue(
            addresses.worker_init_status_queue_addr, is_server=False, name="worker_init_status_queue"
        )
        self.results = FusedIpcQueue(addresses.result_queue_addr, is_server=False, name="worker_result_queue")
        self.stats = FusedIpcQueue(addresses.stats_queue_addr, is_server=False, name="worker_stats_queue")

    def tell_proxy_to_quit(self, worker: GenerationExecutorWorker) -> None:
        """Stop the worker, so that its last responses are out, then let the proxy's threads end."""
        try:
            worker.shutdown()
        finally:
            for queue in (self.results, self.stats):
                if not queue.put_noblock(None):
                    logger.debug("the proxy is gone")


def _serve(worker: GenerationExecutorWorker, requests: IpcQueue) -> None:
    while True:
        try:
            request = requests.get()
        except EOFError:
            return
        if request is None:
            return
        if isinstance(request, CancellingRequest):
            worker.abort_request(request.id)
        elif isinstance(request, GenerationRequest):
            _submit(worker, request)
        else:
            raise ValueError(f"unknown request type: {type(request)}")


def _submit(worker: GenerationExecutorWorker, request: GenerationRequest) -> None:
    try:
        worker.submit(request)
    except RequestError as error:
        logger.error(f"submit request failed: {error}")
        assert request.id is not None
        worker._await_response_helper.temp_error_responses.put(
            ErrorResponse(request.id, RequestError(str(error)), request.id)
        )


def _picklable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
