"""Rows that are lost on the way come out as missing, with the cause, and nothing shifts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracle import moe_layer_ids
from support.rollouts import ask, check_oracle, check_with_gaps, engine, prompts, settings, together

import trtllm_r3
from trtllm_r3.flow.causes import Cause
from trtllm_r3.flow.recorder import RouteRecorder

Oracle = tuple[str, dict[str, Any]]


def captured(llm: Any) -> Any:
    """The CapturedEngine behind an LLM that runs in this process."""
    return llm._executor.engine.model_engine._trtllm_r3


@pytest.mark.parametrize("overlap", [True, False])
def test_a_dropped_commit_leaves_its_rows_missing(
    oracle: Oracle, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    with engine(path, **settings(overlap=overlap)) as llm:
        recorder = captured(llm).recorder
        real, steps = RouteRecorder._commit, []

        def drop_third(self: RouteRecorder, ticket: Any) -> None:
            steps.append(ticket.layout.step)
            if len(steps) != 3:
                real(self, ticket)

        monkeypatch.setattr(RouteRecorder, "_commit", drop_third)
        [output] = together(llm, [[5, 6, 7, 8, 9]], [ask(max_tokens=8)])
        assert recorder.store.live == 0
    check_with_gaps(output, config, {6: "absent"})


def test_a_layer_that_skips_its_router_is_missing_and_the_others_are_right(oracle: Oracle) -> None:
    path, config = oracle
    with engine(path, **settings(graphs=False, overlap=False)) as llm:
        capturer = captured(llm).recorder.capturer
        real, calls = capturer.hear, []

        def deaf_in_layer_one(ids: torch.Tensor, logits: torch.Tensor) -> None:
            calls.append(1)
            if capturer._visit.layer != 1 or len(calls) > 8:
                real(ids, logits)

        capturer.hear = deaf_in_layer_one
        [output] = together(llm, [[5, 6, 7, 8, 9]], [ask(max_tokens=8)])
    check_with_gaps(output, config, dict.fromkeys(range(6), "not captured"))
    ids = trtllm_r3.routes_of(output.outputs[0]).ids
    assert ids is not None
    assert (ids[:6, 1] == -1).all()
    assert (ids[:6, 0] >= 0).all()


def test_a_graph_without_our_op_gives_missing_rows_not_those_of_the_step_before(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    from trtllm_r3.flow.capturer import RouteCapturer

    real = RouteCapturer._close_pass

    def deaf_while_recording(self: RouteCapturer) -> None:
        from trtllm_r3.flow.capturer import _host_may_read

        if _host_may_read():
            real(self)
        else:
            self._open = False

    monkeypatch.setattr(RouteCapturer, "_close_pass", deaf_while_recording)
    with engine(path, **settings(graphs=True)) as llm:
        [output] = together(llm, [[5, 6, 7, 8, 9]], [ask(max_tokens=8)])
    check_with_gaps(output, config, dict.fromkeys(range(5, 12), "not captured"))


def test_a_row_too_many_in_a_step_drops_the_step(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = oracle
    with engine(path, **settings(overlap=False, graphs=False)) as llm:
        model_engine = llm._executor.engine.model_engine
        real = type(model_engine)._prepare_inputs
        fed: list[int] = []

        def one_more(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = real(self, *args, **kwargs)
            if not fed and self.attn_metadata.num_contexts:
                fed.append(1)
                self.attn_metadata.request_ids = [
                    *self.attn_metadata.request_ids[:1],
                    10**6,
                    *self.attn_metadata.request_ids[1:],
                ]
            return result

        monkeypatch.setattr(type(model_engine), "_prepare_inputs", one_more)
        outputs = together(llm, [[5, 6, 7], [8, 9, 10, 11]], [ask(max_tokens=4)] * 2)
        assert captured(llm).recorder.counters["lost_layout"] == 7
    check_with_gaps(outputs[0], config, dict.fromkeys(range(3), "layout"))
    check_with_gaps(outputs[1], config, dict.fromkeys(range(4), "layout"))


def test_positions_that_are_not_consecutive_are_never_guessed(oracle: Oracle) -> None:
    path, config = oracle
    with engine(path, **settings(overlap=False)) as llm:
        recorder = captured(llm).recorder
        real, seen = recorder.begin_step, []

        def skip_one(slots: Any, positions: Any, counts: Any) -> None:
            seen.append(1)
            real(slots, [p + (len(seen) == 4) for p in positions], counts)

        recorder.begin_step = skip_one
        [output] = together(llm, [[5, 6, 7, 8, 9]], [ask(max_tokens=8)])
    routes = trtllm_r3.routes_of(output.outputs[0])
    assert routes.missing.tolist() == [False] * 7 + [True] * 5
    assert {g.cause for g in routes.gaps} <= {Cause.POSITION.label, Cause.ABSENT.label}


def test_a_full_ring_loses_rows_instead_of_waiting(oracle: Oracle) -> None:
    path, config = oracle
    with engine(path, **settings()) as llm:
        copier = captured(llm).recorder.copier
        free, copier._free = copier._free, []
        [first] = together(llm, [[5, 6, 7]], [ask(max_tokens=4)])
        copier._free = free
        [second] = together(llm, [[5, 6, 7]], [ask(max_tokens=4)])
    check_with_gaps(first, config, dict.fromkeys(range(6), "staging"))
    check_oracle(second, config)


def test_hits_in_the_kv_cache_without_rows_are_marked_prefix(oracle: Oracle) -> None:
    path, config = oracle
    trtllm_r3.enable(shared_cache_tokens=0)
    shared = prompts(1, longest=200, vocab=config["vocab_size"], seed=3)[0] * 8
    shared = shared[:150]
    with engine(path, reuse=True, **settings()) as llm:
        [first] = together(llm, [shared], [ask(max_tokens=4)])
        [second] = together(llm, [[*shared, 7, 8]], [ask(max_tokens=4)])
    check_oracle(first, config)
    routes = trtllm_r3.routes_of(second.outputs[0])
    assert [g.cause for g in routes.gaps] == ["prefix"]
    hit = routes.gaps[0].stop
    assert 100 <= hit <= 151
    check_with_gaps(second, config, dict.fromkeys(range(hit), "prefix"))


def test_layers_are_named_by_their_decoder_index(oracle: Oracle) -> None:
    path, config = oracle
    with engine(path, **settings()) as llm:
        [output] = together(llm, [[5, 6, 7]], [ask(max_tokens=2)])
    routes = trtllm_r3.routes_of(output.outputs[0])
    assert list(routes.moe_layer_ids) == moe_layer_ids(config)
    assert (routes.num_experts, routes.top_k) == (config["num_experts"], config["num_experts_per_tok"])
