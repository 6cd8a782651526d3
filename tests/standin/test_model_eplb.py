"""The stand-in's expert load balancer in a layer: replicas, placements, moves, remap of the ids."""

from __future__ import annotations

import pytest
import torch

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.eplb import EXPERTS, INNER, PLACED, SLOTS, layer, placed, rows, watch_slots, weights  # noqa: E402
from tensorrt_llm._torch.modules.fused_moe import MoEWeightLoadingMode  # noqa: E402
from tensorrt_llm._torch.modules.fused_moe.load_balance_plan import count_replicas, plan_slots  # noqa: E402
from tensorrt_llm._torch.modules.fused_moe.moe_load_balancer import (  # noqa: E402
    MoeLoadBalancerIterContext,
    get_moe_load_balancer,
)
from tensorrt_llm.llmapi import MoeLoadBalancerConfig  # noqa: E402

REMAPS = pytest.mark.parametrize("remap", ["out", "in"])
CLASSES = pytest.mark.parametrize("configurable", ["1", "0"])


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
