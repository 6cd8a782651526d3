"""The stand-in's expert load balancer: replicas, placements, moves between iterations, remap of the ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import tiny_qwen3_moe
from support.rollouts import engine, prompts, settings

import trtllm_r3.standin

trtllm_r3.standin.install()

from tensorrt_llm import SamplingParams  # noqa: E402
from tensorrt_llm._torch.model_config import ModelConfig  # noqa: E402
from tensorrt_llm._torch.modules.fused_moe import (  # noqa: E402
    MoEWeightLoadingMode,
    RenormalizeMoeRoutingMethod,
    create_moe,
)
from tensorrt_llm._torch.modules.fused_moe.load_balance_plan import count_replicas, plan_slots  # noqa: E402
from tensorrt_llm._torch.modules.fused_moe.moe_load_balancer import (  # noqa: E402
    MoeLoadBalancer,
    MoeLoadBalancerIterContext,
    get_moe_load_balancer,
    maybe_create_moe_load_balancer,
)
from tensorrt_llm.llmapi import MoeConfig, MoeLoadBalancerConfig, TorchLlmArgs  # noqa: E402
from tensorrt_llm.llmapi.llm_args_check import check_supported  # noqa: E402

HIDDEN, INNER, EXPERTS, TOP_K, SLOTS = 16, 32, 6, 3, 9
PLACED = [3, 0, 5, 0, 1, 4, 0, 2, 0]
REMAPS = pytest.mark.parametrize("remap", ["out", "in"])
CLASSES = pytest.mark.parametrize("configurable", ["1", "0"])


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}
    return {
        f"{e}.{name}.weight": torch.randn(*shape, generator=generator) * 0.3
        for e in range(EXPERTS)
        for name, shape in shapes.items()
    }


def layer(balancer: MoeLoadBalancerConfig | None = None, **options: Any) -> tuple[Any, Any]:
    config = ModelConfig(moe_load_balancer=balancer, **options)
    with maybe_create_moe_load_balancer(config, None) as active:
        method = RenormalizeMoeRoutingMethod(TOP_K)
        moe = create_moe(method, EXPERTS, HIDDEN, INNER, torch.float32, model_config=config, layer_idx=4)
    moe.load_weights([weights()])
    return moe, active


def placed(updates: int = 0, slots: list[int] | None = None) -> MoeLoadBalancerConfig:
    assigned = {4: PLACED if slots is None else slots}
    return MoeLoadBalancerConfig(
        num_slots=len(assigned[4]), initial_global_assignments=assigned, layer_updates_per_iter=updates
    )


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, HIDDEN, generator=generator), torch.randn(count, EXPERTS, generator=generator)


def watch_slots(moe: Any) -> list[torch.Tensor]:
    """The slots that the experts' kernel is given from now on."""
    backend, seen = getattr(moe, "backend", moe), []
    original = backend.run_moe

    def run_moe(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((kwargs.get("token_selected_experts", args[1] if len(args) > 1 else None)).clone())
        return original(*args, **kwargs)

    backend.run_moe = run_moe
    return seen


@REMAPS
@CLASSES
@pytest.mark.parametrize("count", [0, 1, 7, 40, 3000])
@pytest.mark.parametrize("chunk", [None, 16])
def test_outputs_are_bit_equal_to_those_without_a_load_balancer(
    monkeypatch: pytest.MonkeyPatch, remap: str, configurable: str, count: int, chunk: int | None
) -> None:
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", remap)
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    x, logits = rows(count)
    plain, _ = layer(moe_max_num_tokens=chunk)
    moe, _ = layer(placed(), moe_max_num_tokens=chunk)
    assert torch.equal(moe(x, logits), plain(x, logits))


@REMAPS
@CLASSES
def test_every_id_becomes_a_slot_that_holds_its_expert_and_rows_alternate_between_replicas(
    monkeypatch: pytest.MonkeyPatch, remap: str, configurable: str
) -> None:
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", remap)
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    moe, _ = layer(placed())
    x, logits = rows(50)
    logits[:, 0] = 10.0
    ids = moe.routing_method.apply(logits)[0]
    given = watch_slots(moe)
    moe(x, logits)
    (slots,) = given
    assert slots.dtype == torch.int32
    assert int(slots.min()) >= 0
    assert int(slots.max()) < SLOTS
    assert torch.equal(torch.tensor(PLACED, dtype=torch.int32)[slots.long()], ids)
    assert slots[:8, 0].tolist() == [1, 3, 6, 8, 1, 3, 6, 8]


@REMAPS
def test_only_the_remap_in_place_writes_to_the_ids(monkeypatch: pytest.MonkeyPatch, remap: str) -> None:
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", remap)
    moe, _ = layer(placed())
    kept: list[torch.Tensor] = []
    original = moe.routing_method.apply

    def apply(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, scales = original(logits)
        kept.extend((ids, ids.clone()))
        return ids, scales

    moe.routing_method.apply = apply
    moe(*rows(20))
    assert torch.equal(*kept) == (remap == "out")


@REMAPS
@CLASSES
def test_moves_change_the_placement_and_not_the_output(
    monkeypatch: pytest.MonkeyPatch, remap: str, configurable: str
) -> None:
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", remap)
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    x, logits = rows(30)
    expected = layer()[0](x, logits)
    moe, balancer = layer(placed(updates=1))
    single = moe.layer_load_balancer
    addresses = [t.data_ptr() for t in (single.slots, single.replicas, moe.w3_w1_weight, moe.w2_weight)]
    before = list(single.slot_experts)
    for _ in range(12):
        with MoeLoadBalancerIterContext(balancer, True, True):
            assert torch.equal(moe(x, logits), expected)
        assert single.slot_experts != before
        before = list(single.slot_experts)
        assert set(before) == set(range(EXPERTS))
    assert addresses == [
        t.data_ptr() for t in (single.slots, single.replicas, moe.w3_w1_weight, moe.w2_weight)
    ]


@REMAPS
def test_statistics_count_experts_and_only_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, remap: str
) -> None:
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", remap)
    moe, balancer = layer(placed(updates=1), moe_max_num_tokens=8)
    x, logits = rows(30)
    ids = moe.routing_method.apply(logits)[0].clone()
    for wanted in (False, True, False, True):
        with MoeLoadBalancerIterContext(balancer, wanted, False):
            moe(x, logits)
    loads = moe.layer_load_balancer.expert_loads
    assert torch.equal(loads, 2 * torch.bincount(ids.flatten(), minlength=EXPERTS))
    assert moe.layer_load_balancer.slot_experts == PLACED


def test_the_busiest_experts_get_the_spare_slots() -> None:
    assert count_replicas([80, 10, 30, 0], 7) == [3, 1, 2, 1]
    assert count_replicas([0, 0], 2) == [1, 1]
    assert plan_slots([1, 5, 3], [1, 2, 0], 1) == [0, 1, 2]
    assert plan_slots([1, 5, 3], [1, 2, 0], 3) == [0, 1, 2], "the same placement again is none"
    assert plan_slots([7], [0, 0], 1) == [0, 0]


@CLASSES
def test_new_weights_reach_every_replica_wherever_the_experts_are(
    monkeypatch: pytest.MonkeyPatch, configurable: str
) -> None:
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    moe, balancer = layer(placed(updates=1))
    with MoeLoadBalancerIterContext(balancer, True, True):
        moe(*rows(9))
    doubled = {name: value * 2 for name, value in weights().items()}
    moe.load_weights([doubled])
    stacked = {
        "gate_up_proj": torch.stack(
            [torch.cat((doubled[f"{e}.w1.weight"], doubled[f"{e}.w3.weight"])) for e in range(EXPERTS)]
        ),
        "down_proj": torch.stack([doubled[f"{e}.w2.weight"] for e in range(EXPERTS)]),
    }
    seen = [moe.w3_w1_weight.clone(), moe.w2_weight.clone()]
    for slot, expert in enumerate(moe.slot_experts):
        assert torch.equal(seen[0][slot, :INNER], doubled[f"{expert}.w3.weight"])
        assert torch.equal(seen[0][slot, INNER:], doubled[f"{expert}.w1.weight"])
        assert torch.equal(seen[1][slot], doubled[f"{expert}.w2.weight"])
    moe.weight_loading_mode = MoEWeightLoadingMode.FUSED_GATE_UP_PROJ
    getattr(moe, "backend", moe).weight_loading_mode = MoEWeightLoadingMode.FUSED_GATE_UP_PROJ
    moe.w3_w1_weight.data.zero_()
    moe.load_weights([stacked])
    assert torch.equal(moe.w3_w1_weight, seen[0])
    with pytest.raises(ValueError, match="expert weight of shape"):
        moe.load_weights([{name: value[:-1] for name, value in stacked.items()}])


def test_experts_come_in_order_and_begin_again_where_nothing_is_assigned() -> None:
    moe, _ = layer(MoeLoadBalancerConfig(num_slots=8))
    assert moe.slot_experts == [0, 1, 2, 3, 4, 5, 0, 1]
    assert moe.layer_load_balancer is moe.backend.layer_load_balancer
    assert get_moe_load_balancer() is None


@pytest.mark.parametrize(
    ("balancer", "options", "message"),
    [
        (placed(slots=[0, 1, 2, 3, 4, 4]), {}, "each of 6 experts"),
        (MoeLoadBalancerConfig(num_slots=5), {}, "num_slots=5 is less than 6 experts"),
        (MoeLoadBalancerConfig(), {}, "num_slots=None"),
        (placed(), {"moe_backend": "TRTLLM"}, "load balancer is on"),
    ],
)
def test_what_cannot_be_placed_is_an_error(
    balancer: MoeLoadBalancerConfig, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layer(balancer, **options)


def test_unknown_layers_remaps_and_ranks_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="no layer 4"):
        layer(MoeLoadBalancerConfig(num_slots=6, initial_global_assignments={1: list(range(6))}))
    with pytest.raises(ValueError, match="ep_size=2"):
        MoeLoadBalancer(0, 2, 0)
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", "aside")
    with pytest.raises(ValueError, match="TLLM_STANDIN_EPLB_REMAP='aside'"):
        layer(placed())


@pytest.mark.parametrize(
    ("moe_config", "message"),
    [
        (MoeConfig(load_balancer="eplb.yaml"), "load_balancer='eplb.yaml'"),
        (MoeConfig(load_balancer={"layer_updates_per_iter": 1}), "num_slots=None"),
        (MoeConfig(load_balancer={"num_slots": 8}, backend="VANILLA"), "backend='VANILLA'"),
        (MoeConfig(load_balancer={"num_slots": 8}, backend="TRTLLM"), "backend='TRTLLM'"),
    ],
)
def test_options_that_cannot_be_honoured_are_named(moe_config: MoeConfig, message: str) -> None:
    args = TorchLlmArgs(model="/nowhere", skip_tokenizer_init=True, moe_config=moe_config)
    with pytest.raises(ValueError, match=message):
        check_supported(args)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("qwen3_moe")
    return tiny_qwen3_moe(path)


@REMAPS
@pytest.mark.parametrize(("graphs", "moe_chunks", "configurable"), [(True, 1, "1"), (False, 3, "0")])
def test_an_engine_that_moves_experts_says_the_same_tokens(
    qwen: str, monkeypatch: pytest.MonkeyPatch, remap: str, graphs: bool, moe_chunks: int, configurable: str
) -> None:
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", remap)
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    asked = prompts(9, longest=60, vocab=96, seed=3)
    options = settings(graphs=graphs, moe_chunks=moe_chunks)
    sampling = SamplingParams(max_tokens=16, end_id=-1)
    with engine(qwen, routes=False, **options) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(asked, sampling, use_tqdm=False)]
    balanced = MoeLoadBalancerConfig(
        num_slots=16,
        initial_global_assignments={i: [0] * 4 + [(7 * e + i) % 12 for e in range(12)] for i in range(4)},
        layer_updates_per_iter=1,
    )
    moe_config = options["moe_config"].model_copy(update={"load_balancer": balanced})
    with engine(qwen, routes=False, **{**options, "moe_config": moe_config}) as llm:
        balancer = llm._executor.engine.model_engine.moe_load_balancer
        singles = balancer.single_layer_load_balancers
        first = [list(single.slot_experts) for single in singles]
        assert first == [balanced.initial_global_assignments[i] for i in range(4)], "warm-up moves nothing"
        assert all(int(single.expert_loads.sum()) == 0 for single in singles)
        moved = [o.outputs[0].token_ids for o in llm.generate(asked, sampling, use_tqdm=False)]
        assert moved == plain
        assert all(single.updates > 2 for single in singles)
        assert [single.slot_experts for single in singles] != first
        assert all(int(single.expert_loads.sum()) > 0 for single in singles)
