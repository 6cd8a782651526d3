"""MoE layers of the stand-in: who routes, in which order, with what tensors."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import trtllm_r3.standin

trtllm_r3.standin.install()

from tensorrt_llm._torch.model_config import ModelConfig  # noqa: E402
from tensorrt_llm._torch.modules.fused_moe import (  # noqa: E402
    BaseMoeRoutingMethod,
    ConfigurableMoE,
    CutlassFusedMoE,
    DeepSeekV3MoeRoutingMethod,
    Deepseekv3RoutingImpl,
    DefaultMoeRoutingMethod,
    RenormalizeMoeRoutingMethod,
    RenormalizeNaiveMoeRoutingMethod,
    TRTLLMGenFusedMoE,
    VanillaMoE,
    create_moe,
)
from tensorrt_llm._torch.modules.fused_moe.expert_ops import grouped_experts  # noqa: E402
from tensorrt_llm._torch.modules.fused_moe.grouped_blocks import BlockPlan, blocked_linear  # noqa: E402
from tensorrt_llm._torch.utils import model_extra_attrs, set_torch_compiling  # noqa: E402

HIDDEN, INNER, EXPERTS, TOP_K = 16, 32, 6, 3


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}
    return {
        f"{e}.{name}.weight": torch.randn(*shape, generator=generator) * 0.3
        for e in range(EXPERTS)
        for name, shape in shapes.items()
    }


def layer(
    method: BaseMoeRoutingMethod | None = None, config: ModelConfig | None = None, **options: Any
) -> Any:
    config = config or ModelConfig(**options)
    moe = create_moe(
        method or RenormalizeMoeRoutingMethod(TOP_K),
        EXPERTS,
        HIDDEN,
        INNER,
        torch.float32,
        model_config=config,
        layer_idx=4,
    )
    moe.load_weights([weights()])
    return moe


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, HIDDEN, generator=generator), torch.randn(count, EXPERTS, generator=generator)


def by_hand(x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    given = weights()
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for expert, scale in zip(ids[row].tolist(), scales[row], strict=True):
            gate, up = x[row] @ given[f"{expert}.w1.weight"].T, x[row] @ given[f"{expert}.w3.weight"].T
            out[row] += scale * ((torch.nn.functional.silu(gate) * up) @ given[f"{expert}.w2.weight"].T)
    return out


def listen(moe: Any) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    original = moe.routing_method.apply
    moe.routing_method.apply = lambda logits: (seen.append(logits), original(logits))[1]
    return seen


METHODS: dict[str, BaseMoeRoutingMethod] = {
    "default": DefaultMoeRoutingMethod(TOP_K),
    "renormalize": RenormalizeMoeRoutingMethod(TOP_K),
    "naive": RenormalizeNaiveMoeRoutingMethod(TOP_K),
    "deepseek": DeepSeekV3MoeRoutingMethod(TOP_K, 2, 1, 2.5, lambda: torch.linspace(-1, 1, EXPERTS)),
}


@pytest.mark.parametrize("configurable", ["1", "0"])
@pytest.mark.parametrize("backend", ["CUTLASS", "TRTLLM", "VANILLA"])
@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_a_layer_gives_the_weighted_sum_of_its_experts(
    name: str, backend: str, configurable: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    moe, (x, logits) = layer(METHODS[name], moe_backend=backend, moe_max_num_tokens=16), rows(count)
    ids, scales = METHODS[name].apply(logits)
    assert (ids.dtype, scales.dtype, ids.shape) == (torch.int32, torch.float32, (count, TOP_K))
    torch.testing.assert_close(moe(x, logits), by_hand(x, ids, scales), rtol=1e-4, atol=1e-5)


def test_the_environment_decides_about_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(layer(), ConfigurableMoE)
    assert isinstance(layer().backend, CutlassFusedMoE)
    assert isinstance(layer(moe_backend="trtllm").backend, TRTLLMGenFusedMoE)
    assert isinstance(layer(moe_backend="VANILLA"), VanillaMoE)
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", "0")
    assert isinstance(layer(), CutlassFusedMoE)
    assert isinstance(layer(moe_backend="TRTLLM"), TRTLLMGenFusedMoE)


def test_the_backend_mirrors_the_wrapper_and_shares_its_routing() -> None:
    moe = layer()
    assert (moe.layer_idx, moe.backend.layer_idx, moe.backend.layer_idx_str) == (4, 4, "4")
    assert moe.backend.routing_method is moe.routing_method
    assert moe.register_to_config
    assert not moe.backend.register_to_config


def test_a_layer_is_registered_by_a_weak_reference() -> None:
    config = ModelConfig()
    moe = layer(config=config)
    reference = config.extra_attrs["moe_layers"]["4"]
    assert isinstance(reference, weakref.ref)
    assert reference() is moe
    layer(config=config)
    assert list(config.extra_attrs["moe_layers"]) == ["4", "4_0"]


@pytest.mark.parametrize("configurable", ["1", "0"])
def test_chunks_are_views_of_the_logits_and_even(configurable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    moe, (x, logits) = layer(moe_max_num_tokens=4), rows(11)
    seen = listen(moe)
    whole = moe(x, logits)
    assert [(part.storage_offset() // part.stride(0), len(part)) for part in seen] == [(0, 4), (4, 4), (8, 3)]
    assert {part.untyped_storage().data_ptr() for part in seen} == {logits.untyped_storage().data_ptr()}
    torch.testing.assert_close(whole, layer()(x, logits))
    assert moe.split_chunk(11, 3) == [4, 4, 3]


def test_the_fused_backend_routes_only_where_it_says_so() -> None:
    moe, (x, logits) = layer(moe_backend="TRTLLM"), rows(9)
    seen = listen(moe)
    fused = moe(x, logits)
    assert seen == []
    moe.backend._supports_load_balancer = lambda: True
    torch.testing.assert_close(moe(x, logits), fused)
    assert len(seen) == 1


def test_an_instance_may_replace_forward_impl_and_apply() -> None:
    moe, (x, logits) = layer(), rows(5)
    calls, original = [], moe.forward_impl
    moe.forward_impl = lambda *args, **kwargs: (calls.append(args[1]), original(*args, **kwargs))[1]
    seen = listen(moe)
    moe(x, logits)
    assert calls[0] is logits
    assert seen[0] is logits


def test_a_compiled_model_goes_through_the_operator() -> None:
    config = ModelConfig()
    moe, (x, logits) = layer(config=config), rows(5)
    expected = layer()(x, logits)
    calls, original = [], moe.forward_impl
    moe.forward_impl = lambda *args, **kwargs: (calls.append(kwargs), original(*args, **kwargs))[1]
    set_torch_compiling(True)
    try:
        with pytest.raises(RuntimeError, match="layer_idx='4'"):
            moe(x, logits)
        with model_extra_attrs(config.extra_attrs):
            torch.testing.assert_close(moe(x, logits, all_rank_num_tokens=[5]), expected)
            compiled = torch.compile(moe, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(x, logits), expected)
    finally:
        set_torch_compiling(False)
    assert calls[0]["all_rank_num_tokens"] == [5]
    assert len(calls) == 2


def test_remapped_slots_reach_the_backend_and_not_the_router() -> None:
    moe, (x, logits) = layer(), rows(6)
    ids, scales = METHODS["renormalize"].apply(logits)
    moe._load_balancer_route = lambda ids, use_dp: (ids + 1) % EXPERTS
    torch.testing.assert_close(moe(x, logits), by_hand(x, (ids + 1) % EXPERTS, scales), rtol=1e-4, atol=1e-5)


def test_the_weights_keep_their_place_when_they_change() -> None:
    moe, (x, logits) = layer(), rows(3)
    where = moe.w3_w1_weight.data_ptr()
    before = moe(x, logits)
    moe.load_weights([{"2.w2.weight": torch.zeros(HIDDEN, INNER)}], allow_partial_loading=True)
    assert moe.w3_w1_weight.data_ptr() == where
    assert not torch.equal(moe(x, logits), before)
    with pytest.raises(ValueError, match="lacking"):
        moe.load_weights([{}])
    with pytest.raises(ValueError, match="shape"):
        moe.load_weights([{"2.w2.weight": torch.zeros(INNER, HIDDEN)}], allow_partial_loading=True)


@pytest.mark.parametrize("pairs", [(0, 5), (1,), (3,) * 70, tuple(range(6)) * 30, (5, 5, 0, 0, 0, 2)])
def test_blocks_of_fixed_size_give_the_product_of_each_row(pairs: tuple[int, ...]) -> None:
    experts = torch.tensor(pairs).sort().values
    weight, x = torch.randn(6, 7, 5), torch.randn(len(pairs), 5)
    plan = BlockPlan(torch.searchsorted(experts, torch.arange(7)), experts)
    expected = torch.stack([weight[e] @ row for e, row in zip(experts, x, strict=True)])
    torch.testing.assert_close(blocked_linear(x, weight, plan), expected)


def test_scales_may_be_absent() -> None:
    moe, (x, _) = layer(), rows(9)
    ids = torch.randint(0, EXPERTS, (9, 1), dtype=torch.int32)
    out = grouped_experts(x, ids, None, moe.w3_w1_weight, moe.w2_weight)
    torch.testing.assert_close(out, by_hand(x, ids, torch.ones(9, 1)), rtol=1e-4, atol=1e-5)


def test_grouped_routing_gives_scales_first() -> None:
    impl, (_, logits) = Deepseekv3RoutingImpl(2, 3, 2, 1.5), rows(20)
    bias = torch.tensor([0.0, 5.0, 0.0, 0.0, 5.0, 0.0])
    scales, ids = impl.noaux_tc(logits, bias)
    assert scales.is_floating_point()
    assert set(ids.unique().tolist()) == {1, 4}
    torch.testing.assert_close(scales.sum(-1), torch.full((20,), 1.5))
    again, _ = impl.apply(logits, bias)
    assert torch.equal(again, ids.to(torch.int32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_backend": "DEEPGEMM"}, "DEEPGEMM"),
        ({"moe_backend": "TRITON"}, "CUTLASS, TRTLLM, VANILLA"),
        ({"moe_max_num_tokens": 0}, "moe_max_num_tokens=0"),
        ({"quant_config": object()}, "quant_config"),
    ],
)
def test_what_is_not_supported_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**options)


def test_results_without_the_final_sum_are_refused() -> None:
    with pytest.raises(ValueError, match="do_finalize"):
        layer()(*rows(2), do_finalize=False)
