"""Rows under an expert load balancer: logical ids, whatever the engine makes of them after routing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.oracle import expected_ids
from support.rollouts import ask, check_oracle, engine, prompts, sequence, settings, together

import trtllm_r3

Oracle = tuple[str, dict[str, Any]]
CELLS = list(itertools.product(["out", "in"], ["step", "layer"], [True, False], [1, 3], ["1", "0"]))
# Each pair of values occurs; the other cells run with the slow tests.
PAIRWISE = {
    ("out", "step", True, 1, "1"),
    ("in", "step", True, 3, "0"),
    ("in", "step", False, 1, "1"),
    ("out", "step", False, 3, "0"),
    ("in", "layer", True, 1, "1"),
    ("out", "layer", True, 3, "1"),
    ("in", "layer", False, 3, "0"),
    ("out", "layer", False, 1, "0"),
}


def cell_id(cell: tuple[str, str, bool, int, str]) -> str:
    remap, capture, graphs, moe_chunks, configurable = cell
    return f"{remap}-{capture}-graphs={int(graphs)}-moe_chunks={moe_chunks}-configurable={configurable}"


def balanced(config: dict[str, Any], *, updates: int, replicas: int = 4, identity: bool = False) -> Any:
    """A load balancer: `replicas` of expert 0 between the others, turned by layer; or each expert in its slot."""
    from tensorrt_llm.llmapi import MoeLoadBalancerConfig

    experts, placed = config["num_experts"], {}
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        others = [1 + (e + layer) % (experts - 1) for e in range(experts - 1)]
        turned = [0, *others[:4], *[0] * (replicas - 2), *others[4:], 0]
        placed[layer] = list(range(experts)) if identity else turned
    slots = len(next(iter(placed.values())))
    return MoeLoadBalancerConfig(
        num_slots=slots, initial_global_assignments=placed, layer_updates_per_iter=updates
    )


def with_balancer(options: dict[str, Any], balancer: Any) -> dict[str, Any]:
    """Engine options and a load balancer."""
    return {**options, "moe_config": options["moe_config"].model_copy(update={"load_balancer": balancer})}


def layers_of(llm: Any) -> list[Any]:
    """The load balancers of the layers, in order."""
    layers: list[Any] = llm._executor.engine.model_engine.moe_load_balancer.single_layer_load_balancers
    return layers


def singly(llm: Any) -> list[int]:
    """Ordinals of the layers that the plugin captures one by one."""
    captured = llm._executor.engine.model_engine._trtllm_r3.status()
    assert captured in trtllm_r3.status()["engines"]
    found: list[int] = captured["layers_captured_singly"]
    return found


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=cell_id(c), marks=[] if c in PAIRWISE else pytest.mark.slow) for c in CELLS]
)
def test_every_row_is_the_oracles_while_experts_move(
    oracle: Oracle, cell: tuple[str, str, bool, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    remap, capture, graphs, moe_chunks, configurable = cell
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", remap)
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    options = settings(graphs=graphs, moe_chunks=moe_chunks)
    asked = prompts(14, longest=120, vocab=config["vocab_size"])
    trtllm_r3.enable(capture=capture)
    params = [ask(max_tokens=1 + (5 * i) % 17) for i in range(len(asked))]
    with engine(path, **options) as llm:
        plain = together(llm, asked, params)
    with engine(path, **with_balancer(options, balanced(config, updates=1))) as llm:
        singles = layers_of(llm)
        first = [list(single.slot_experts) for single in singles]
        assert all(slots.count(0) == 4 and slots != sorted(slots) for slots in first)
        outputs = together(llm, asked, params)
        assert all(single.updates > 2 for single in singles)
        assert all(single.slot_experts != was for single, was in zip(singles, first, strict=True))
        assert singly(llm) == ([] if (remap, capture) == ("out", "step") else list(range(len(singles))))
    for output, without in zip(outputs, plain, strict=True):
        check_oracle(output, config)
        ids = output.outputs[0].routed_experts
        assert torch.equal(ids, without.outputs[0].routed_experts)
        assert len(ids) == 0 or int(ids.max()) < config["num_experts"]


@pytest.mark.parametrize("graphs", [True, False])
def test_a_remap_in_place_that_hides_behind_a_copy_shows_in_the_values(
    oracle: Oracle, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorrt_llm._torch.modules.fused_moe.moe_load_balancer import SingleLayerMoeLoadBalancer

    path, config = oracle
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", "in")
    route = SingleLayerMoeLoadBalancer.route
    monkeypatch.setattr(SingleLayerMoeLoadBalancer, "route", lambda *args: route(*args).clone())
    options = with_balancer(settings(graphs=graphs), balanced(config, updates=1))
    with engine(path, **options) as llm:
        assert singly(llm) == list(range(len(layers_of(llm)))), "warm-up has shown it"
        for output in together(llm, prompts(9, longest=90, vocab=config["vocab_size"]), ask(max_tokens=9)):
            check_oracle(output, config)


@pytest.mark.parametrize("configurable", ["1", "0"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("autotuner", [True, False])
def test_a_placement_that_is_the_identity_until_later_never_yields_a_wrong_id(
    oracle: Oracle, graphs: bool, autotuner: bool, configurable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = oracle
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", "in")
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    options = with_balancer(settings(graphs=graphs), balanced(config, updates=1, identity=True))
    asked = prompts(14, longest=120, vocab=config["vocab_size"])
    with engine(path, enable_autotuner=autotuner, **options) as llm:
        identity = list(range(config["num_experts"]))
        assert [single.slot_experts for single in layers_of(llm)] == [identity] * len(layers_of(llm))
        outputs = together(llm, asked, [ask(max_tokens=1 + (5 * i) % 17) for i in range(len(asked))])
        assert all(single.slot_experts != identity for single in layers_of(llm))
        assert singly(llm) == list(range(len(layers_of(llm))))
    there = 0
    for output in outputs:
        routes = trtllm_r3.routes_of(output.outputs[0])
        assert routes.ids is not None
        ids = routes.ids.numpy()
        known = ids >= 0
        want = expected_ids(sequence(output)[:-1], None, None, config)
        assert (ids[known] == want[known]).all()
        assert {gap.cause for gap in routes.gaps} <= {"changed"}
        there += int(known.all((1, 2)).sum())
    lost = sum(len(sequence(output)) - 1 for output in outputs) - there
    # Without any forward before the first request, the first step shows what the load balancer does.
    assert (lost == 0) if graphs or autotuner else (0 < lost <= options["max_num_tokens"])
