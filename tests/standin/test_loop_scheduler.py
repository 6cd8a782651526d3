"""Which requests take part in a step: by the blocks they need, then by the tokens they bring."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trtllm_r3.standin

trtllm_r3.standin.install()

from tensorrt_llm._torch.pyexecutor.llm_request import (  # noqa: E402
    FinishReason,
    LlmRequest,
    LlmRequestState,
    SamplingConfig,
)
from tensorrt_llm._torch.pyexecutor.resource_manager import KVCacheManager  # noqa: E402
from tensorrt_llm._torch.pyexecutor.scheduler import (  # noqa: E402
    BindCapacityScheduler,
    BindMicroBatchScheduler,
    ScheduledRequests,
    SchedulerOutput,
    SimpleScheduler,
)
from tensorrt_llm.bindings.executor import CapacitySchedulerPolicy as Policy  # noqa: E402
from tensorrt_llm.bindings.executor import ContextChunkingPolicy  # noqa: E402
from tensorrt_llm.llmapi import CapacitySchedulerPolicy as ApiPolicy  # noqa: E402
from tensorrt_llm.llmapi import KvCacheConfig  # noqa: E402

TPB = 4
NO_EVICT = Policy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = Policy.MAX_UTILIZATION
STATIC = Policy.STATIC_BATCH
FCFS, EQUAL = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED, ContextChunkingPolicy.EQUAL_PROGRESS


def make_manager(blocks: int, reuse: bool = False) -> KVCacheManager:
    return KVCacheManager(
        KvCacheConfig(enable_block_reuse=reuse),
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        tokens_per_block=TPB,
        max_seq_len=64,
        max_batch_size=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_tokens=blocks * TPB,
    )


def make_request(request_id: int, prompt: int, new: int = 4) -> LlmRequest:
    tokens = [request_id * 100 + index for index in range(prompt)]
    config = SamplingConfig()
    return LlmRequest(request_id=request_id, max_new_tokens=new, input_tokens=tokens, sampling_config=config)


class Loop:
    """The engine's loop without a model: every token is 1, every request ends by length."""

    def __init__(self, blocks: int, policy: Policy = NO_EVICT, *, reuse: bool = False) -> None:
        self.manager = make_manager(blocks, reuse)
        self.scheduler = SimpleScheduler(
            BindCapacityScheduler(8, self.manager, policy),
            BindMicroBatchScheduler(8, 64, (FCFS, TPB)),
        )
        self.active: list[LlmRequest] = []

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule_request(self.active, set())
        for request in output.paused_requests:
            request.pause(1 << 30)
            self.manager.free_resources(request)
        batch = ScheduledRequests()
        batch.context_requests = output.context_requests
        batch.generation_requests = output.generation_requests
        self.manager.prepare_resources(batch)
        for request in output.context_requests:
            request.move_to_next_context_chunk()
            if not request.context_remaining_length:
                request.state = LlmRequestState.GENERATION_IN_PROGRESS
        for request in batch.all_requests():
            if request.is_generation_in_progress_state:
                request.add_new_token(1, 0)
                if request.max_num_generated_tokens >= request.max_new_tokens:
                    request.finish_by_reason(FinishReason.LENGTH)
                    self.manager.free_resources(request)
        self.manager.update_resources(batch)
        self.active = [request for request in self.active if not request.is_finished]
        return output


def ids(requests: list[LlmRequest]) -> list[int]:
    return [request.request_id for request in requests]


# ---- by blocks ----


def test_no_evict_starts_only_what_can_be_completed_beside_all_that_runs() -> None:
    loop = Loop(5)
    loop.active = [make_request(1, 8, new=4), make_request(2, 4, new=4), make_request(3, 4, new=1)]
    assert ids(loop.step().context_requests) == [1, 2]
    assert loop.manager.get_num_free_blocks() == 2  # kept for what 1 and 2 still generate
    output = loop.step()
    assert (ids(output.generation_requests), output.context_requests) == ([1, 2], [])


def test_static_batch_starts_nothing_while_something_runs() -> None:
    loop = Loop(50, STATIC)
    loop.active = [make_request(1, 4, new=2)]
    loop.step()
    loop.active.append(make_request(2, 4))
    assert ids(loop.step().generation_requests) == [1]
    assert ids(loop.step().context_requests) == [2]


def test_max_utilization_pauses_the_youngest_when_the_oldest_needs_a_block() -> None:
    loop = Loop(4, MAX_UTILIZATION)
    loop.active = [make_request(1, 4, new=8), make_request(2, 8, new=4)]
    assert ids(loop.step().context_requests) == [1, 2]
    output = loop.step()
    assert (ids(output.generation_requests), ids(output.paused_requests)) == ([1], [2])
    assert loop.active[1].prompt_len == 9


def test_max_utilization_does_not_pause_a_request_whose_last_token_is_in_flight() -> None:
    loop = Loop(4, MAX_UTILIZATION)
    loop.active = [make_request(1, 4, new=8), make_request(2, 8, new=4)]
    loop.step()
    loop.active[1].state = LlmRequestState.GENERATION_TO_COMPLETE
    output = loop.scheduler.schedule_request(loop.active, set())
    assert output.paused_requests == [] or ids(output.paused_requests) == [1]
    assert 2 not in ids(output.generation_requests)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_request_that_can_never_run_is_an_error_and_not_a_standstill(policy: Policy) -> None:
    loop = Loop(2, policy)
    loop.active = [make_request(1, 9)]
    with pytest.raises(RuntimeError, match="request 1 needs 3 KV blocks"):
        loop.step()


def test_the_policies_of_the_api_and_of_the_bindings_are_the_same() -> None:
    scheduler = BindCapacityScheduler(8, make_manager(4), ApiPolicy.MAX_UTILIZATION)
    assert scheduler.scheduler_policy is MAX_UTILIZATION


def test_equal_prompts_wait_for_the_first_where_its_blocks_can_be_reused() -> None:
    loop = Loop(50, reuse=True)
    loop.active = [make_request(1, 9), make_request(1, 9)]
    loop.active[1].request_id = loop.active[1].py_request_id = 2
    assert ids(loop.step().context_requests) == [1]
    output = loop.step()
    assert ids(output.context_requests) == [2]
    assert output.context_requests[0].prepopulated_prompt_len == 8


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(Policy)),
    st.booleans(),
    st.integers(5, 12),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=10),
)
def test_every_request_ends_with_all_its_tokens(
    policy: Policy, reuse: bool, blocks: int, arrivals: list[tuple[int, int, int]]
) -> None:
    loop = Loop(blocks, policy, reuse=reuse)
    requests = [make_request(index % 3, prompt, new) for index, (_, prompt, new) in enumerate(arrivals)]
    for index, request in enumerate(requests):
        request.request_id = request.py_request_id = index
    for step in range(400):
        loop.active += [request for request, (at, _, _) in zip(requests, arrivals, strict=True) if at == step]
        if loop.active:
            loop.step()
    for request, (_, prompt, new) in zip(requests, arrivals, strict=True):
        assert request.is_finished
        assert request.get_num_tokens(0) == prompt + new
    assert loop.manager.get_num_free_blocks() == blocks


# ---- by tokens ----


def generating(request_id: int) -> LlmRequest:
    request = make_request(request_id, 4)
    request.context_current_position = 4
    request.state = LlmRequestState.GENERATION_IN_PROGRESS
    return request


def test_generations_come_first_and_a_whole_prompt_must_fit_into_the_rest() -> None:
    scheduler = BindMicroBatchScheduler(8, 10)
    active = [make_request(1, 7), make_request(2, 2), generating(3), generating(4)]
    contexts, generations = scheduler.schedule(active, set())
    assert (ids(contexts), ids(generations)) == ([1], [3, 4])
    assert active[0].context_chunk_size == 7


def test_the_batch_size_limits_both_kinds_together() -> None:
    scheduler = BindMicroBatchScheduler(3, 100)
    active = [make_request(1, 7), make_request(2, 2), generating(3), generating(4)]
    contexts, generations = scheduler.schedule(active, set())
    assert (ids(contexts), ids(generations)) == ([1], [3, 4])


def test_what_is_in_flight_or_about_to_end_is_left_out() -> None:
    scheduler = BindMicroBatchScheduler(8, 100)
    ending = generating(2)
    ending.state = LlmRequestState.GENERATION_TO_COMPLETE
    contexts, generations = scheduler.schedule([make_request(1, 3), ending, generating(3)], {1})
    assert (ids(contexts), ids(generations)) == ([], [3])


def test_first_come_first_served_gives_the_rest_to_the_next_in_whole_units() -> None:
    scheduler = BindMicroBatchScheduler(8, 16, (FCFS, 4))
    active = [make_request(1, 5), make_request(2, 20), make_request(3, 9), generating(4)]
    contexts, _ = scheduler.schedule(active, set())
    assert {r.request_id: r.context_chunk_size for r in contexts} == {1: 5, 2: 8}


def test_equal_progress_deals_out_units_in_turn() -> None:
    scheduler = BindMicroBatchScheduler(8, 20, (EQUAL, 4))
    active = [make_request(1, 5), make_request(2, 20), make_request(3, 9)]
    contexts, _ = scheduler.schedule(active, set())
    assert {r.request_id: r.context_chunk_size for r in contexts} == {1: 5, 2: 8, 3: 4}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 30), max_size=6),
    st.integers(0, 4),
    st.integers(4, 40),
    st.sampled_from([None, (FCFS, 4), (EQUAL, 4)]),
)
def test_a_step_keeps_its_limits_and_unfinished_chunks_end_with_a_unit(
    prompts: list[int], running: int, tokens: int, config: tuple[ContextChunkingPolicy, int] | None
) -> None:
    scheduler = BindMicroBatchScheduler(6, tokens, config, tokens_per_block=TPB)
    active = [make_request(index, length) for index, length in enumerate(prompts)]
    active += [generating(100 + index) for index in range(running)]
    contexts, generations = scheduler.schedule(active, set())
    assert len(contexts) + len(generations) <= 6
    assert sum(r.context_chunk_size for r in contexts) + len(generations) <= tokens
    assert len(generations) == running
    for request in contexts:
        assert request.context_chunk_size > 0
        assert request.is_last_context_chunk or request.context_chunk_size % TPB == 0


def test_the_lists_of_a_step_are_counted() -> None:
    batch = ScheduledRequests()
    batch.context_requests, batch.generation_requests = [make_request(1, 3)], [generating(2), generating(3)]
    assert (batch.num_context_requests, batch.num_generation_requests, batch.batch_size) == (1, 2, 3)
    assert ids(batch.all_requests()) == [1, 2, 3]
    assert not batch.can_run_cuda_graph
    batch.context_requests = []
    assert batch.is_generation_only
    assert batch.can_run_cuda_graph
