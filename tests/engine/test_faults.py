"""Whatever fails in a hook of ours, requests finish with the same tokens and the engine lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.nonce import Nonces
from support.oracle import expected_continuation, expected_ids
from support.rollouts import ask, cached, engine, prompts, settings, together

import trtllm_r3
from trtllm_r3.flow.capturer import RouteCapturer
from trtllm_r3.flow.recorder import RouteRecorder
from trtllm_r3.flow.shared_cache import SharedRouteCache
from trtllm_r3.trtllm import executor, manager, requests, responses, routing, steps
from trtllm_r3.trtllm.engine import CapturedEngine
from trtllm_r3.trtllm.runtime import runtime

Oracle = tuple[str, dict[str, Any]]

# Every place where a hook calls something of ours: (owner, name, what a user sees).
ENGINE = "fault"  # capture stops; later rows are missing
REQUEST = "request"  # that request has no routes, the next one has
PLACES = [
    (executor, "read_spans", ENGINE),
    (RouteRecorder, "begin_step", ENGINE),
    (RouteRecorder, "end_step", ENGINE),
    (RouteRecorder, "_commit", ENGINE),
    (RouteRecorder, "_freeze", ENGINE),
    (executor, "_check_layout", ENGINE),
    (steps, "_slot_in_context", ENGINE),
    (CapturedEngine, "wants", ENGINE),
    (CapturedEngine, "admit", ENGINE),
    (RouteCapturer, "enter", ENGINE),
    (RouteCapturer, "hear", ENGINE),
    (RouteCapturer, "leave", ENGINE),
    (RouteCapturer, "_close_pass", ENGINE),
    (routing, "_local_rows", ENGINE),
    (manager, "_let_go", REQUEST),
    (RouteRecorder, "finish", REQUEST),
    (CapturedEngine, "track_of", REQUEST),
    (responses, "pack_none", REQUEST),
    (responses, "_payload", REQUEST),
    (responses, "_receive", REQUEST),
    (responses, "unpack", REQUEST),
    (requests, "ask_of", REQUEST),
]


@pytest.fixture(autouse=True)
def _no_faults_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime(), "faults", [])  # a list of the process, with room for the latest only


def fail_once(real: Callable[..., Any], fired: list[int]) -> Callable[..., Any]:
    def failing(*args: Any, **kwargs: Any) -> Any:
        fired.append(1)
        if len(fired) == 1:
            raise RuntimeError("injected")
        return real(*args, **kwargs)

    return failing


@pytest.mark.parametrize(
    ("owner", "name", "kind"), PLACES, ids=[f"{o.__name__.split('.')[-1]}.{n}" for o, n, _ in PLACES]
)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_fault_in_a_hook_costs_rows_and_nothing_else(
    oracle: Oracle, owner: Any, name: str, kind: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    asked = prompts(5, longest=40, vocab=config["vocab_size"], seed=2)
    with engine(path, **settings(overlap=overlap, graphs=False)) as llm:
        fired: list[int] = []
        params = [ask(max_tokens=6) for _ in asked]
        futures = [llm.generate_async(p, s) for p, s in zip(asked[:1], params[:1], strict=True)]
        monkeypatch.setattr(owner, name, fail_once(getattr(owner, name), fired))
        for prompt, sampling in zip(asked[1:], params[1:], strict=True):
            try:
                futures.append(llm.generate_async(prompt, sampling))
            except Exception as refused:
                assert "return_routed_experts" in str(refused)
        outputs = [f.result() for f in futures]
        if not fired:
            outputs += together(llm, asked[:1], [ask(max_tokens=6)])
        [after] = together(llm, [[5, 6, 7]], [ask(return_routed_experts=False, max_tokens=3)])
    assert fired, "the place was never reached"
    assert after.outputs[0].token_ids == expected_continuation([5, 6, 7], 3, config)
    assert any("injected" in fault for fault in trtllm_r3.status()["faults"])
    for output in outputs:
        completion = output.outputs[0]
        assert completion.token_ids == expected_continuation(output.prompt_token_ids, 6, config)
        routes = trtllm_r3.routes_of(completion)
        if routes.ids is None:
            assert routes.why_none
            continue
        want = expected_ids([*output.prompt_token_ids, *completion.token_ids][:-1], None, None, config)
        got = routes.ids.numpy()
        assert got.shape == want.shape
        assert ((got == want) | (got == -1)).all()


CACHE_PLACES = [
    (CapturedEngine, "resume"),
    (CapturedEngine, "grow"),
    (RouteRecorder, "pause"),
    (RouteRecorder, "release"),
    (RouteRecorder, "_keep_hits"),
    (SharedRouteCache, "lease"),
    (SharedRouteCache, "extend"),
    (SharedRouteCache, "places"),
    (SharedRouteCache, "let_go"),
    (SharedRouteCache, "write"),
    (SharedRouteCache, "read"),
]


@pytest.mark.parametrize(("owner", "name"), CACHE_PLACES, ids=[f"{o.__name__}.{n}" for o, n in CACHE_PLACES])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_fault_while_requests_pause_and_hit_the_cache_costs_rows_and_nothing_else(
    oracle: Oracle, owner: Any, name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    nonces = Nonces(monkeypatch)
    asked = prompts(6, longest=40, vocab=97, seed=21)
    fired: list[int] = []
    options = cached(kv_tokens=160, policy="MAX_UTILIZATION", overlap=overlap, graphs=False)
    with engine(path, **options) as llm:
        outputs = together(llm, asked[:1] * 2, [ask(max_tokens=12)] * 2)
        monkeypatch.setattr(owner, name, fail_once(getattr(owner, name), fired))
        outputs += together(llm, asked, [ask(max_tokens=50)] * 6)
        again = together(llm, asked, [ask(return_routed_experts=False, max_tokens=4)] * 6)
    assert fired, "the place was never reached"
    assert any("injected" in fault for fault in trtllm_r3.status()["faults"])
    for output in (*outputs, *again):
        token_ids = output.outputs[0].token_ids
        assert token_ids == expected_continuation(output.prompt_token_ids, len(token_ids), config)
        assert output.outputs[0].finish_reason == "length"
    for output in outputs:
        routes = trtllm_r3.routes_of(output.outputs[0])
        if routes.ids is None:
            assert routes.why_none
        else:
            nonces.check_ids(output, config)


def test_after_a_fault_new_requests_that_ask_are_refused_one_by_one(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = oracle
    with engine(path, **settings(graphs=False)) as llm:
        monkeypatch.setattr(RouteCapturer, "hear", fail_once(RouteCapturer.hear, []))
        together(llm, [[5, 6, 7]], [ask(max_tokens=3)])
        assert trtllm_r3.status()["engines"][0]["degraded"].startswith("routing_method.apply: RuntimeError")
        with pytest.raises(Exception, match="an engine that captures"):
            llm.generate([5, 6, 7], ask(), use_tqdm=False)
        [output] = together(llm, [[5, 6, 7]], [ask(return_routed_experts=False)])
    assert output.outputs[0].finish_reason == "length"
