"""The stations of one iteration. Part of PyExecutor."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..._utils import nvtx_range
from .executor_responses import ExecutorResponses
from .executor_state import BatchState
from .handle_logits import HandleLogits
from .iteration_stats import IterationStats
from .llm_request import LlmRequest, LlmRequestState
from .sampler import SampleState, SampleStateTensors
from .scheduler import ScheduledRequests
from .streams import current_stream, use_stream


class ExecutorSteps(IterationStats, ExecutorResponses):
    """Fetch, schedule, forward, sample, update."""

    # ---- fetch and schedule ----

    def _prepare_and_schedule_batch(self) -> tuple[ScheduledRequests | None, dict[str, Any] | None]:
        """The coming step's requests, and the statistics it will fill; None when the loop has to end."""
        new_requests = self._fetch_and_activate_new_requests()
        if self.should_stop_processing:
            return None, None
        stats = self._get_init_iter_stats(len(new_requests)) if self.enable_iter_perf_stats else None
        self._pad_attention_dp_dummy_request()
        scheduled = self._schedule()
        self.num_scheduled_requests = scheduled.batch_size
        return scheduled, stats

    @property
    def should_stop_processing(self) -> bool:
        """Whether a shutdown was asked for and nothing is left to do."""
        request_queue = self.executor_request_queue
        return request_queue.is_shutdown and not self.active_requests and not request_queue.waiting_queue

    def _fetch_and_activate_new_requests(self) -> list[LlmRequest]:
        """New requests, checked; a bad one is answered with its error."""
        fetched = self.executor_request_queue.fetch_new_requests(self.active_requests)
        self.expected_num_active_requests = len(self.active_requests) + len(fetched)
        valid = []
        for request in fetched:
            try:
                self._validate_request(request)
            except ValueError as error:
                self._handle_errors(str(error), requests=[request])
            else:
                valid.append(request)
        self.active_requests.extend(valid)
        return valid

    def _validate_request(self, request: LlmRequest) -> None:
        """ValueError for a request that could never run."""
        self.sampler.validate_request(request)
        length, needed = request.prompt_len, self.kv_cache_manager.get_needed_resource_to_completion(request)
        if length >= self.max_seq_len:
            raise ValueError(f"prompt of {length} tokens: max_seq_len is {self.max_seq_len}")
        if length > self.max_num_tokens and not self.llm_args.enable_chunked_prefill:
            raise ValueError(
                f"prompt of {length} tokens: max_num_tokens is {self.max_num_tokens}, chunked prefill is off"
            )
        if needed > self.kv_cache_manager.get_max_resource_count():
            raise ValueError(
                f"request needs {needed} KV blocks, there are {self.kv_cache_manager.max_tokens} tokens"
            )
        vocab_size = getattr(getattr(self.model_engine, "model", None), "vocab_size_padded", None)
        tokens = request.get_tokens(0)
        if min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size):
            raise ValueError(f"prompt has token ids outside of [0, {vocab_size})")

    def _pad_attention_dp_dummy_request(self) -> None:
        """With attention DP a rank without requests computes a dummy while the others work."""
        if not self.enable_attention_dp or self.active_requests or not self.expected_num_active_requests:
            return
        (dummy,) = self.kv_cache_manager.add_dummy_requests([0], is_gen=True)
        dummy.is_attention_dp_dummy = True
        self.active_requests.append(dummy)

    @nvtx_range("_schedule")
    def _schedule(self) -> ScheduledRequests:
        """Ask the scheduler."""
        output = self.scheduler.schedule_request(self.active_requests, self.inflight_req_ids)
        scheduled = ScheduledRequests()
        scheduled.context_requests = output.context_requests
        scheduled.generation_requests = output.generation_requests
        scheduled.paused_requests = output.paused_requests
        self._forget_batch_idx_of_skipped(scheduled)
        waits = self.batch_wait_timeout_iters > 0 or self.batch_wait_max_tokens_ratio > 0
        if waits and scheduled.context_requests and scheduled.generation_requests:
            scheduled.context_requests = self._waiting_requests(
                scheduled.context_requests, scheduled.generation_requests
            )
        return scheduled

    def _forget_batch_idx_of_skipped(self, scheduled: ScheduledRequests) -> None:
        """What a request generated is known to the host once it was left out of a step."""
        running = [r for r in self.active_requests if r.state == LlmRequestState.GENERATION_IN_PROGRESS]
        if len(running) > len(scheduled.generation_requests):
            chosen = set(map(id, scheduled.generation_requests))
            for request in running:
                if id(request) not in chosen:
                    request.py_batch_idx = None

    def _waiting_requests(
        self, contexts: list[LlmRequest], generations: list[LlmRequest]
    ) -> list[LlmRequest]:
        """No prompts as long as the step would be small and they have not waited long; else all."""
        tokens = sum(request.get_num_tokens(0) for request in contexts) + len(generations)
        small = tokens < self.batch_wait_max_tokens_ratio * self.max_num_tokens
        if small and self.batch_wait_iters_count < self.batch_wait_timeout_iters:
            self.batch_wait_iters_count += 1
            return []
        self.batch_wait_iters_count = 0
        return contexts

    def _pause_requests(self, requests_to_pause: list[LlmRequest]) -> None:
        """Take everything from running requests; they start again later with what they have as the prompt."""
        for request in requests_to_pause:
            request.pause(self.max_input_len)
            self._terminate_request(request)

    def _can_queue(self, scheduled_batch: ScheduledRequests) -> bool:
        """Whether there is a step to run, on all ranks."""
        if self.enable_attention_dp:
            return 0 not in self.dist.tp_allgather(scheduled_batch.batch_size)
        return scheduled_batch.batch_size > 0

    # ---- forward and sample ----

    def _forward_step(
        self,
        scheduled_requests: ScheduledRequests,
        new_tensors_device: SampleStateTensors | None = None,
        num_accepted_tokens_device: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor] | None:
        """Launch the model on the execution stream; None if it failed, and with it every active request."""
        try:
            gather_context_logits = any(
                r.py_return_context_logits for r in scheduled_requests.context_requests
            )
            self.execution_stream.wait_stream(current_stream())
            with use_stream(self.execution_stream), nvtx_range("_forward_step"):
                outputs: dict[str, torch.Tensor] = self.model_engine.forward(
                    scheduled_requests,
                    self.resource_manager,
                    new_tensors_device,
                    gather_context_logits=gather_context_logits,
                    cache_indirection_buffer=self.sampler.get_cache_indirection(),
                    num_accepted_tokens_device=num_accepted_tokens_device,  # type: ignore[call-arg]
                )
            current_stream().wait_stream(self.execution_stream)
        except Exception as error:
            self._log_and_fail("forward function", error)
            return None
        return outputs

    @nvtx_range("_sample_async")
    def _sample_async(
        self, scheduled_batch: ScheduledRequests, batch_outputs: dict[str, torch.Tensor] | None
    ) -> SampleState | None:
        """Launch the sampling; None if it failed, and with it every active request."""
        if batch_outputs is None:
            return None
        try:
            bounds = self._context_logits_bounds(scheduled_batch)
            HandleLogits()(
                scheduled_batch.context_requests,
                scheduled_batch.generation_requests,
                batch_outputs["logits"],
                bounds,
            )
            return self.sampler.sample_async(scheduled_batch, batch_outputs, bounds, self.resource_manager)
        except Exception as error:
            self._log_and_fail("sampling", error)
            return None

    @staticmethod
    def _context_logits_bounds(scheduled_batch: ScheduledRequests) -> list[int]:
        """First logits row of each prompt, then that of the generations."""
        contexts = scheduled_batch.context_requests
        gathered = any(request.py_return_context_logits for request in contexts)
        bounds = [0]
        for request in contexts:
            bounds.append(bounds[-1] + (request.context_chunk_size if gathered else 1))
        return bounds

    # ---- update ----

    def _update_request_states(self, scheduled_requests: ScheduledRequests) -> None:
        """After a launch: prompts advance; with overlap, what ends by length is not run again."""
        self._update_request_states_tp(scheduled_requests)

    def _update_request_states_tp(self, scheduled_requests: ScheduledRequests) -> None:
        if self.active_requests and self.active_requests[-1].is_attention_dp_dummy:
            dummy = self.active_requests.pop()
            dummy.state = LlmRequestState.GENERATION_COMPLETE
            self._terminate_request(dummy)
        for request in scheduled_requests.context_requests:
            if request.state == LlmRequestState.GENERATION_COMPLETE:
                continue
            begin = request.context_current_position
            request.py_last_context_chunk = (begin, begin + request.context_chunk_size)
            request.move_to_next_context_chunk()
            if request.context_remaining_length == 0:
                request.state = self._next_state(request)
        for request in scheduled_requests.generation_requests:
            if request.state == LlmRequestState.GENERATION_IN_PROGRESS:
                request.state = self._next_state(request)

    def _next_state(self, request: LlmRequest) -> LlmRequestState:
        if not self.disable_overlap_scheduler and request.will_complete_next_iteration():
            return LlmRequestState.GENERATION_TO_COMPLETE
        return LlmRequestState.GENERATION_IN_PROGRESS

    @nvtx_range("_update_requests")
    def _update_requests(self, sample_state: SampleState) -> None:
        """Wait for a step's tokens and take them; if that fails, every active request fails."""
        try:
            self.sampler.update_requests(sample_state, self.resource_manager)
        except Exception as error:
            self._log_and_fail("sampling", error)

    def _update_resources(self, scheduled_requests: ScheduledRequests) -> None:
        attn_metadata = getattr(self.model_engine, "attn_metadata", None)
        byte_size = getattr(self.model_engine, "kv_cache_dtype_byte_size", None)
        self.resource_manager.update_resources(scheduled_requests, attn_metadata, byte_size)

    def _finish_stats(self, batch: BatchState, finished: list[LlmRequest]) -> None:
        """A step was answered: publish its statistics."""
        if batch.iter_stats is not None or self.print_log:
            seconds = time.time() - batch.iter_start_time
            self._process_iter_stats(batch, finished, seconds)
