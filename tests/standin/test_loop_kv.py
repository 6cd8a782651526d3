"""The KV cache of the engine: who finds whose blocks, what they hold, and what happens when they run out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
from tensorrt_llm._torch.pyexecutor.resource_manager import (  # noqa: E402
    BaseResourceManager,
    KVCacheManager,
    ResourceManager,
    ResourceManagerType,
)
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests  # noqa: E402
from tensorrt_llm._torch.pyexecutor.seq_slot_manager import SeqSlotManager  # noqa: E402
from tensorrt_llm.llmapi import KvCacheConfig  # noqa: E402

TPB = 4
CPU = torch.device("cpu")


def make_manager(blocks: int = 16, *, layers: int = 2, **options: bool) -> KVCacheManager:
    return KVCacheManager(
        KvCacheConfig(**options),
        num_layers=layers,
        num_kv_heads=1,
        head_dim=1,
        tokens_per_block=TPB,
        max_seq_len=64,
        max_batch_size=8,
        dtype=torch.int64,
        device=CPU,
        max_tokens=blocks * TPB,
    )


def make_request(request_id: int, tokens: list[int], *, salt: int | None = None, new: int = 8) -> LlmRequest:
    return LlmRequest(
        request_id=request_id,
        max_new_tokens=new,
        input_tokens=tokens,
        sampling_config=SamplingConfig(),
        cache_salt_id=salt,
    )


def batch(contexts: list[LlmRequest] = [], generations: list[LlmRequest] = []) -> ScheduledRequests:  # noqa: B006
    scheduled = ScheduledRequests()
    scheduled.context_requests = list(contexts)
    scheduled.generation_requests = list(generations)
    return scheduled


def content(tokens: list[int], salt: int | None, version: int = 0) -> int:
    """What a model would write for the last of `tokens`: depends on all of them."""
    return hash((tuple(tokens), salt, version)) & 0xFFFFFFFF


@dataclass
class Loop:
    """Drives one manager as the engine's loop does, with a model whose cache entries can be checked."""

    manager: KVCacheManager
    version: int = 0
    versions: dict[int, int] = field(default_factory=dict)

    def start(self, request: LlmRequest, chunk: int | None = None) -> int:
        """The prompt, in chunks; the number of tokens found."""
        self.versions[request.request_id] = self.version
        found = 0
        while request.context_remaining_length:
            request.context_chunk_size = chunk or request.context_remaining_length
            scheduled = batch([request])
            first = request.context_current_position == 0
            self.manager.prepare_resources(scheduled)
            found = request.prepopulated_prompt_len if first else found
            begin, size = request.context_current_position, request.context_chunk_size
            assert size > 0
            self.forward(request, begin, begin + size)
            request.move_to_next_context_chunk()
            if not request.context_remaining_length:
                request.state = LlmRequestState.GENERATION_IN_PROGRESS
                request.add_new_token(7, 0)
            self.manager.update_resources(scheduled)
        return found

    def step(self, request: LlmRequest, token: int) -> None:
        scheduled = batch(generations=[request])
        self.manager.prepare_resources(scheduled)
        length = request.get_num_tokens(0)
        self.forward(request, length - 1, length)
        request.add_new_token(token, 0)
        self.manager.update_resources(scheduled)

    def end(self, request: LlmRequest) -> None:
        request.finish_by_reason(FinishReason.LENGTH)
        self.manager.free_resources(request)

    def forward(self, request: LlmRequest, begin: int, end: int) -> None:
        """Check all before `begin`, write `[begin, end)`."""
        tokens, salt = request.get_tokens(0), request.cache_salt_id
        blocks = self.manager.get_cache_indices(request)
        version = self.versions[request.request_id]
        for position in range(end):
            block, offset = blocks[position // TPB], position % TPB
            wanted = content(tokens[: position + 1], salt, version)
            entry = self.manager.kv_pool[:, block, :, offset]
            if position < begin:
                assert (entry == wanted).all(), (position, block)
            else:
                entry.fill_(wanted)


# ---- reuse ----


def test_a_second_prompt_starts_behind_the_full_blocks_of_the_first_even_while_the_first_runs() -> None:
    loop = Loop(make_manager())
    first, second = make_request(1, list(range(10))), make_request(2, [*range(8), 50, 51])
    assert loop.start(first) == 0
    assert loop.start(second) == 8
    ids = loop.manager.get_batch_cache_indices([1, 2])
    assert ids[0][:2] == ids[1][:2]
    assert ids[0][2] != ids[1][2]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    loop = Loop(make_manager())
    first, second = make_request(1, list(range(8))), make_request(2, list(range(8)))
    loop.start(first)
    loop.end(first)
    assert loop.start(second) == 7


def test_generated_tokens_are_found_after_the_request_ended_all_but_the_last() -> None:
    loop = Loop(make_manager())
    first = make_request(1, list(range(6)))
    loop.start(first)
    for token in range(20, 25):
        loop.step(first, token)
    loop.end(first)
    tokens = first.get_tokens(0)
    assert loop.start(make_request(2, [*tokens, 99])) == len(tokens) - 1


def test_a_partly_matching_leaf_without_users_is_taken_over_under_the_same_id() -> None:
    loop = Loop(make_manager())
    first = make_request(1, [0, 1, 2, 3, 4, 5])
    loop.start(first)
    ids = loop.manager.get_cache_indices(first)
    loop.end(first)
    second = make_request(2, [0, 1, 2, 3, 4, 60, 61])
    assert loop.start(second) == 5
    assert loop.manager.get_cache_indices(second) == ids


def test_what_a_taken_over_block_held_is_not_found_any_more() -> None:
    loop = Loop(make_manager())
    first = make_request(1, [0, 1, 2, 3, 4, 5])
    loop.start(first)
    loop.end(first)
    assert loop.start(make_request(2, [0, 1, 2, 3, 4, 60, 61])) == 5
    assert loop.start(make_request(3, [0, 1, 2, 3, 4, 5, 6])) == 4


def test_a_partly_matching_block_in_use_is_copied() -> None:
    loop = Loop(make_manager())
    first, second = make_request(1, list(range(9))), make_request(2, [0, 1, 2, 3, 4, 60, 61])
    loop.start(first)
    assert loop.start(second) == 5
    ids = loop.manager.get_batch_cache_indices([1, 2])
    assert ids[0][0] == ids[1][0]
    assert ids[0][1] != ids[1][1]
    for token in range(3):
        loop.step(first, token)
        loop.step(second, token)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"enable_block_reuse": False}, 0),
        ({"enable_partial_reuse": False}, 4),
        ({"copy_on_partial_reuse": False}, 4),
        ({}, 5),
    ],
)
def test_the_options_of_reuse_are_honoured(options: dict[str, bool], found: int) -> None:
    loop = Loop(make_manager(**options))
    loop.start(make_request(1, list(range(9))))
    assert loop.start(make_request(2, [0, 1, 2, 3, 4, 60, 61])) == found


def test_another_salt_finds_nothing() -> None:
    loop = Loop(make_manager())
    loop.start(make_request(1, list(range(9)), salt=1))
    assert loop.start(make_request(2, list(range(9)), salt=2)) == 0
    assert loop.start(make_request(3, list(range(9)), salt=1)) == 8


def test_dummies_neither_find_nor_leave_anything() -> None:
    manager = make_manager()
    (context,) = manager.add_dummy_requests([90], [9])
    (generation,) = manager.add_dummy_requests([91], [9], is_gen=True)
    assert context.is_dummy
    assert (generation.prompt_len, generation.get_num_tokens(0)) == (8, 9)
    assert generation.is_generation_in_progress_state
    assert manager.get_num_free_blocks() == 16 - 6
    for dummy in (context, generation):
        manager.free_resources(dummy)
    assert manager.get_num_free_blocks() == 16
    assert Loop(manager).start(make_request(1, [1] * 9)) == 0


def test_dummies_that_do_not_fit_leave_nothing_behind() -> None:
    manager = make_manager(blocks=2)
    with pytest.raises(RuntimeError, match="dummy"):
        manager.add_dummy_requests([1, 2, 3])
    assert manager.get_num_free_blocks() == 2


# ---- chunks, freeing, reset ----


def test_a_chunk_behind_a_hit_ends_with_a_block() -> None:
    loop = Loop(make_manager())
    loop.start(make_request(1, list(range(9))))
    second = make_request(2, [0, 1, 2, 3, 4, *range(60, 75)])
    second.context_chunk_size = 8
    loop.manager.prepare_resources(batch([second]))
    assert (second.context_current_position, second.context_chunk_size) == (5, 7)


def test_a_chunk_behind_a_hit_may_become_the_last() -> None:
    loop = Loop(make_manager())
    loop.start(make_request(1, list(range(9))))
    second = make_request(2, list(range(12)))
    second.context_chunk_size = 4
    loop.manager.prepare_resources(batch([second]))
    assert (second.context_current_position, second.context_chunk_size) == (8, 4)
    assert second.is_last_context_chunk


def test_a_request_freed_between_chunks_leaves_only_what_was_computed() -> None:
    loop = Loop(make_manager())
    first = make_request(1, list(range(12)))
    first.context_chunk_size = 4
    loop.versions[1] = 0
    loop.manager.prepare_resources(batch([first]))
    loop.forward(first, 0, 4)
    first.move_to_next_context_chunk()
    loop.manager.free_resources(first)
    assert loop.start(make_request(2, list(range(12)))) == 4


def test_freeing_twice_is_the_same_as_once() -> None:
    loop = Loop(make_manager())
    first = make_request(1, list(range(9)))
    loop.start(first)
    loop.end(first)
    loop.manager.free_resources(first)
    assert loop.manager.get_num_free_blocks() == 16


def test_a_failed_request_leaves_nothing_to_be_found() -> None:
    loop = Loop(make_manager())
    first = make_request(1, list(range(9)))
    first.context_chunk_size = 9
    loop.manager.prepare_resources(batch([first]))
    first.state = LlmRequestState.GENERATION_COMPLETE
    loop.manager.free_resources(first)
    assert loop.start(make_request(2, list(range(9)))) == 0


def test_a_paused_request_finds_its_own_blocks() -> None:
    loop = Loop(make_manager())
    first = make_request(1, list(range(6)))
    loop.start(first)
    for token in range(3):
        loop.step(first, token)
    first.pause(1 << 30)
    loop.manager.free_resources(first)
    assert loop.manager.get_num_free_blocks() == 16
    assert loop.start(first) == 9


def test_nothing_computed_before_a_reset_is_found_after_it() -> None:
    loop = Loop(make_manager())
    ended, running = make_request(1, list(range(9))), make_request(2, list(range(100, 109)))
    loop.start(ended)
    loop.end(ended)
    loop.start(running)
    loop.manager.reset_reuse_state()
    loop.version = 1
    loop.step(running, 5)
    loop.end(running)
    assert loop.start(make_request(3, list(range(9)))) == 0
    assert loop.start(make_request(4, list(range(100, 109)))) == 0
    assert loop.start(make_request(5, list(range(9)))) == 8


def test_a_reset_of_a_very_long_chain_is_no_deep_recursion() -> None:
    loop = Loop(make_manager(blocks=1500, layers=1))
    request = make_request(1, list(range(1400 * TPB)))
    request.context_chunk_size = 1400 * TPB
    loop.manager.prepare_resources(batch([request]))
    request.move_to_next_context_chunk()
    loop.manager.update_resources(batch([request]))
    loop.manager.reset_reuse_state()
    assert loop.start(make_request(2, list(range(9)))) == 0


# ---- limits ----


def test_a_prompt_that_does_not_fit_is_an_error_and_takes_nothing() -> None:
    loop = Loop(make_manager(blocks=3))
    with pytest.raises(RuntimeError, match="KV block"):
        loop.start(make_request(1, list(range(13))))
    assert loop.manager.get_num_free_blocks() == 3


def test_sizes_are_told_in_blocks_and_tokens() -> None:
    manager = make_manager(blocks=5)
    request = make_request(1, list(range(6)), new=3)
    assert manager.get_max_resource_count() == 5
    assert manager.get_needed_resource_to_completion(request) == 3
    assert manager.get_kv_cache_capacity()["maxNumTokens"] == 20
    assert manager.get_num_available_tokens() == 20
    assert manager.get_buffers(1).shape == (5, 2, TPB, 1, 1)
    Loop(manager).start(request)
    assert manager.get_block_ids_per_seq([1]).tolist() == manager.get_batch_cache_indices([1])


def test_the_pool_is_no_inference_tensor() -> None:
    with torch.inference_mode():
        assert not make_manager().kv_pool.is_inference()


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
actions = st.one_of(
    st.tuples(st.just("start"), prompts, st.sampled_from([None, 4, 8]), st.sampled_from([None, 3])),
    st.tuples(st.just("step"), st.integers(0, 5), st.integers(0, 1)),
    st.tuples(st.sampled_from(["end", "pause", "cancel"]), st.integers(0, 5)),
    st.tuples(st.just("reset")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(actions, max_size=60), st.booleans(), st.booleans())
def test_a_position_never_holds_another_prefixs_entry(plan: list[Any], partial: bool, copying: bool) -> None:
    manager = make_manager(blocks=9, enable_partial_reuse=partial, copy_on_partial_reuse=copying)
    loop, running, next_id = Loop(manager), list[LlmRequest](), 0
    for kind, *args in plan:
        if kind == "start":
            request = make_request(next_id, args[0], salt=args[2])
            next_id += 1
            if manager.get_num_free_blocks() >= manager.impl.blocks_for(len(args[0])):
                loop.start(request, args[1])
                running.append(request)
        elif kind == "reset":
            manager.reset_reuse_state()
            loop.version += 1
        elif running:
            request = running[args[0] % len(running)]
            if kind == "step":
                if manager.get_num_free_blocks() and request.get_num_tokens(0) < 30:
                    loop.step(request, args[1])
                continue
            running.remove(request)
            _leave(loop, request, kind)
        held = manager.get_batch_cache_indices([request.request_id for request in running])
        assert manager.get_num_free_blocks() == 9 - len({block for ids in held for block in ids})
    for request in running:
        loop.end(request)
    assert manager.get_num_free_blocks() == 9


def _leave(loop: Loop, request: LlmRequest, kind: str) -> None:
    if kind == "pause":
        request.pause(1 << 30)
        loop.manager.free_resources(request)
    else:
        request.finish_by_reason(FinishReason.CANCELLED if kind == "cancel" else FinishReason.LENGTH)
        loop.manager.free_resources(request)


# ---- the container and the slots ----


class Noting(BaseResourceManager):
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def get_max_resource_count(self) -> int:
        return 1

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        return 0

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        self.calls.append(f"prepare {self.name}")

    def update_resources(self, scheduled_batch: ScheduledRequests, *more: object) -> None:
        self.calls.append(f"update {self.name} {len(more)}")

    def free_resources(self, request: LlmRequest) -> None:
        self.calls.append(f"free {self.name}")


def test_managers_are_called_in_order_and_free_in_reverse_and_only_the_kv_cache_gets_more() -> None:
    calls: list[str] = []
    draft = ResourceManagerType.DRAFT_KV_CACHE_MANAGER
    managers = ResourceManager({"own": Noting("own", calls), draft: None})
    managers.register_resource_manager(ResourceManagerType.KV_CACHE_MANAGER, Noting("kv", calls))
    managers.prepare_resources(batch())
    managers.update_resources(batch(), None, 2.0)
    managers.free_resources(make_request(1, [1]))
    assert calls == ["prepare own", "prepare kv", "update own 0", "update kv 2", "free kv", "free own"]
    managers.reorder_pipeline(list(reversed(managers.resource_managers)))
    assert next(iter(managers.resource_managers)) is ResourceManagerType.KV_CACHE_MANAGER
    assert managers.get_resource_manager("nothing") is None


def test_each_request_has_a_slot_of_its_own_until_it_is_freed() -> None:
    slots = SeqSlotManager(2)
    first, second, third = (make_request(index, [1]) for index in range(3))
    slots.prepare_resources(batch([first], [second]))
    assert {first.py_seq_slot, second.py_seq_slot} == {0, 1}
    with pytest.raises(ValueError, match="2 slots"):
        slots.prepare_resources(batch([third]))
    slots.free_resources(first)
    slots.free_resources(first)
    slots.prepare_resources(batch([third]))
    assert third.seq_slot == first.seq_slot
