"""The caller's end of an engine in a worker process."""

from __future__ import annotations

import weakref
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from .._utils import customized_gc_thresholds
from ..llmapi.mpi_session import MpiPoolSession, MpiSession
from ..llmapi.utils import ManagedThread, _SyncQueue, logger_debug
from ..logger import logger
from .await_response import notify
from .executor import GenerationExecutor
from .ipc import FusedIpcQueue, IpcQueue
from .postproc_worker import PostprocWorkerConfig
from .request import CancellingRequest, GenerationRequest
from .result import GenerationResult
from .utils import ErrorResponse, WorkerCommIpcAddrs, is_llm_response
from .worker import GenerationExecutorWorker, worker_main

_SHUTDOWN_GRACE_S = 60.0


class GenerationExecutorProxy(GenerationExecutor):
    """Starts the worker process, forwards requests to it and deals its responses out to their futures."""

    READY_SIGNAL = b"READY"

    def __init__(
        self,
        worker_kwargs: dict[str, Any],
        model_world_size: int = 1,
        mpi_session: MpiSession | None = None,
        *,
        worker_cls: type[GenerationExecutorWorker] = GenerationExecutorWorker,
        postproc_worker_config: PostprocWorkerConfig | None = None,
        is_llm_executor: bool | None = None,
    ) -> None:
        self.workers_started = False
        config = postproc_worker_config or PostprocWorkerConfig()
        super().__init__(config.num_postprocess_workers, config.postprocess_tokenizer_dir, is_llm_executor)
        self.worker_cls = worker_cls
        self.model_world_size = model_world_size
        self.mpi_futures: list[Future[Any]] = []
        self.mpi_session = (
            mpi_session if mpi_session is not None else MpiPoolSession(n_workers=model_world_size)
        )
        llm_args = worker_kwargs.get("llm_args")
        self.garbage_collection_gen0_threshold = llm_args and llm_args.garbage_collection_gen0_threshold
        self.dispatch_result_thread: ManagedThread | None = None
        self.dispatch_stats_thread: ManagedThread | None = None
        self._start_executor_workers(
            {
                "log_level": logger.level,
                **worker_kwargs,
                "worker_queues": self._setup_queues(),
                "postproc_worker_config": config,
                "is_llm_executor": False,
            }
        )

    def _setup_queues(self) -> WorkerCommIpcAddrs:
        self.request_queue = IpcQueue(is_server=True, name="proxy_request_queue")
        self.worker_init_status_queue = IpcQueue(is_server=True, name="worker_init_status_queue")
        self.result_queue = FusedIpcQueue(is_server=True, name="proxy_result_queue")
        self.mp_stats_queue = FusedIpcQueue(is_server=True, name="proxy_stats_queue")
        return WorkerCommIpcAddrs(
            request_queue_addr=self.request_queue.address,
            worker_init_status_queue_addr=self.worker_init_status_queue.address,
            result_queue_addr=self.result_queue.address,
            stats_queue_addr=self.mp_stats_queue.address,
        )

    def _start_executor_workers(self, worker_kwargs: dict[str, Any]) -> None:
        """Run `worker_main` in the session's processes; wait for the engine, or raise why there is none."""
        from .._torch.models.modeling_utils import MODEL_CLASS_MAPPING

        self.mpi_futures = self.mpi_session.submit(
            worker_main,
            **worker_kwargs,
            worker_cls=self.worker_cls,
            tracer_init_kwargs=None,
            _torch_model_class_mapping=MODEL_CLASS_MAPPING,
            ready_signal=GenerationExecutorProxy.READY_SIGNAL,
        )
        self.workers_started = True
        reference = weakref.ref(self)
        for future in self.mpi_futures:
            future.add_done_callback(lambda done: _on_worker_done(reference, done))
        ready_signal, error_trace = self._wait_for_worker()
        if ready_signal != GenerationExecutorProxy.READY_SIGNAL:
            logger.error(f"Executor worker initialization error: {error_trace}")
            self._give_up(ready_signal)
            raise RuntimeError("Executor worker returned error") from ready_signal

    def _wait_for_worker(self) -> tuple[Any, str | None]:
        """The first word of the worker: the ready signal, or an exception and its traceback."""
        while True:
            try:
                if self.worker_init_status_queue.poll(1):
                    signal, error_trace = self.worker_init_status_queue.get()
                    return signal, error_trace
            except EOFError:
                wait(self.mpi_futures, timeout=5)
            for future in self.mpi_futures:
                if future.done():
                    self._give_up(future.exception())
                    raise RuntimeError("Executor worker died during initialization") from future.exception()

    def _give_up(self, reason: object) -> None:
        """The worker did not start: end its process, close everything."""
        self.doing_shutdown, self.workers_started = True, False
        self.mpi_session.shutdown_abort(reason=reason)
        for queue in (
            self.request_queue,
            self.worker_init_status_queue,
            self.result_queue,
            self.mp_stats_queue,
        ):
            queue.close()

    def _start_dispatch_threads(self) -> None:
        if self.dispatch_result_thread is None:
            self.dispatch_result_thread = ManagedThread(
                weakref.WeakMethod(self.dispatch_result_task),
                error_queue=self._error_queue,
                name="proxy_dispatch_result_thread",
            )
            self.dispatch_stats_thread = ManagedThread(
                weakref.WeakMethod(self.dispatch_stats_task),
                error_queue=self._error_queue,
                name="proxy_dispatch_stats_thread",
            )
            self.dispatch_result_thread.start()
            if self._iter_stats_result is not None:
                self.dispatch_stats_thread.start()
        self._handle_background_error()

    def dispatch_result_task(self) -> bool:
        """Deal one message of the worker out; False when it was the last."""
        with customized_gc_thresholds(self.garbage_collection_gen0_threshold):
            try:
                responses = self.result_queue.get()
            except EOFError:
                return False
        waiting: list[_SyncQueue] = []
        for response in responses:
            if response is None:
                return False
            self._process_response(response, waiting)
        notify(waiting)
        return True

    def _process_response(self, response: Any, waiting: list[_SyncQueue]) -> None:
        result = self._results.get(response.client_id)
        if result is None:
            return
        result.queue.put_nowait(response)
        if isinstance(result.queue, _SyncQueue):
            waiting.append(result.queue)
        if isinstance(response, ErrorResponse) or (is_llm_response(response) and response.result.is_final):
            self._results.pop(response.client_id, None)

    def dispatch_stats_task(self) -> bool:
        """Pass one message of statistics on; False when it was the last."""
        try:
            items = self.mp_stats_queue.get()
        except EOFError:
            return False
        for item in items:
            if item is None:
                return False
            if self._iter_stats_result is not None:
                self._iter_stats_result.queue.put(item)
        return True

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Send a request to the worker; its future."""
        self._start_dispatch_threads()
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
            self.request_queue.put(request)
        except Exception:
            self._results.pop(request.id, None)
            self._handle_background_error()
            raise
        if any(future.done() for future in self.mpi_futures):
            self._fail_pending(RuntimeError("the executor worker has ended"))
        self._handle_background_error()
        return result

    def abort_request(self, request_id: int) -> None:
        """Ask the worker to cancel a request; its last response tells when that is done."""
        if request_id in self._results:
            self.request_queue.put(CancellingRequest(request_id))

    def _fail_pending(self, error: BaseException) -> None:
        """Answer all waiting requests with the error that ended the worker."""
        waiting: list[_SyncQueue] = []
        for client_id in list(self._results):
            self._process_response(ErrorResponse(client_id, error, client_id), waiting)
        notify(waiting)

    def pre_shutdown(self) -> None:
        """Cancel all requests and tell the worker to end."""
        if not self.workers_started or self.doing_shutdown:
            return
        self.doing_shutdown = True
        logger_debug("Proxy.pre_shutdown...")
        if all(not future.done() for future in self.mpi_futures):
            for client_id in list(self._results):
                self.request_queue.put_noblock(CancellingRequest(client_id))
            self.request_queue.put_noblock(None)

    def shutdown(self) -> None:
        """End the worker; raises an error that nobody was told of."""
        if not self.workers_started:
            return
        self.pre_shutdown()
        self.workers_started = False
        for future in self.mpi_futures:
            _wait(future, self.mpi_session)
        for thread, queue in (
            (self.dispatch_result_thread, self.result_queue),
            (self.dispatch_stats_thread, self.mp_stats_queue),
        ):
            if thread is not None and thread.is_alive():
                thread.stop()
                thread.join(5)
            queue.close()
        self.request_queue.close()
        self.worker_init_status_queue.close()
        self._fail_pending(RuntimeError("the LLM was shut down"))
        self.mpi_session.shutdown()
        self._handle_background_error()

    def __del__(self) -> None:
        try:
            self.shutdown()
        except Exception as error:
            logger.error(f"while the executor was shut down: {error!r}")

    def __enter__(self) -> GenerationExecutorProxy:
        return self

    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None:
        self.shutdown()


def _on_worker_done(reference: weakref.ref[GenerationExecutorProxy], future: Future[Any]) -> None:
    """Called in the session's thread when a worker's task has ended."""
    proxy = reference()
    error = future.exception()
    if proxy is None:
        return
    if error is not None:
        proxy._error_queue.put(error)
    if not proxy.doing_shutdown or error is not None:
        proxy._fail_pending(error or RuntimeError("the executor worker has ended"))


def _wait(future: Future[Any], session: MpiSession) -> None:
    try:
        future.exception(timeout=_SHUTDOWN_GRACE_S)
    except FutureTimeoutError:
        logger.critical(f"the worker does not end within {_SHUTDOWN_GRACE_S} s, killing it")
        session.abort()
