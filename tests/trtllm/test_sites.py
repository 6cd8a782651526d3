"""Which MoE layers a model has, and which of them are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from trtllm_r3.errors import UnsupportedError
from trtllm_r3.trtllm.sites import check_sites, find_sites


class Routing:
    def __init__(self, top_k: int = 2) -> None:
        self.experts_per_token = top_k


class MoE(nn.Module):
    def __init__(self, layer_idx: int | None = None, top_k: int = 2, num_experts: int = 8) -> None:
        super().__init__()
        self.routing_method, self.layer_idx, self.num_experts = Routing(top_k), layer_idx, num_experts

    def forward_impl(self, x: Any, router_logits: Any) -> Any:
        return x


class TRTLLMGenFusedMoE(MoE):
    pass


class TritonFusedMoE(MoE):
    pass


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.routing_method = Routing()


class ConfigurableMoE(MoE):
    def __init__(self, backend: nn.Module) -> None:
        super().__init__()
        self.backend = backend


def model_of(layers: dict[str, nn.Module], hidden_layers: int = 9) -> nn.Module:
    """A model with these modules at these dotted paths."""
    root = nn.Module()
    root.model_config = SimpleNamespace(pretrained_config=SimpleNamespace(num_hidden_layers=hidden_layers))
    for path, module in layers.items():
        owner = root
        *parents, last = path.split(".")
        for name in parents:
            if name not in owner._modules:
                owner.add_module(name, nn.Module())
            owner = owner._modules[name]
        owner.add_module(last, module)
    return root


def test_layers_are_numbered_in_the_order_of_their_decoder_index() -> None:
    model = model_of({"model.layers.7.mlp.experts": MoE(7), "model.layers.3.mlp.experts": MoE(None)})
    assert [(s.ordinal, s.layer_id) for s in find_sites(model)] == [(0, 3), (1, 7)]


def test_gates_and_backends_inside_a_layer_are_no_layers_of_their_own() -> None:
    inner = MoE(4)
    model = model_of(
        {"model.layers.4.mlp.gate": Gate(), "model.layers.4.mlp.experts": ConfigurableMoE(inner)}
    )
    [site] = find_sites(model)
    assert type(site.module) is ConfigurableMoE


@pytest.mark.parametrize(
    "path", ["model.mtp.layers.2.experts", "draft_model.layers.2.experts", "model.layers.9.experts"]
)
def test_draft_layers_and_layers_behind_the_decoder_are_left_out(path: str) -> None:
    model = model_of({"model.layers.2.mlp.experts": MoE(), path: MoE()})
    assert [s.name for s in find_sites(model)] == ["model.layers.2.mlp.experts"]


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ({"experts": MoE(None)}, "expected a decoder layer index, found neither its path nor layer_idx"),
        ({"model.layers.2.experts": MoE(3)}, "found path says 2, layer_idx 3"),
        ({"model.layers.2.a": MoE(), "model.layers.2.b": MoE()}, "decoder layer 2 already has the MoE"),
        ({"model.layers.1.a": MoE(), "model.layers.2.a": MoE(top_k=3)}, r"found top_k, experts = \(3, 8\)"),
        ({"model.layers.1.a": MoE(), "model.layers.2.a": MoE(num_experts=9)}, r"experts = \(2, 9\)"),
    ],
)
def test_layers_that_do_not_fit_on_one_axis_are_refused_by_name(
    layers: dict[str, nn.Module], told: str
) -> None:
    with pytest.raises(UnsupportedError, match=told):
        find_sites(model_of(layers))


@pytest.mark.parametrize("kind", [TRTLLMGenFusedMoE, TritonFusedMoE])
def test_layers_that_route_inside_a_kernel_are_refused_with_a_remedy(kind: type[MoE]) -> None:
    sites = find_sites(model_of({"model.layers.2.experts": kind()}))
    with pytest.raises(UnsupportedError, match=rf"model\.layers\.2\.experts \({kind.__name__}\).*CUTLASS"):
        check_sites(sites, separate=False)


def test_a_router_that_is_replaced_by_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_PERFECT_ROUTER", "1")
    with pytest.raises(UnsupportedError, match="ENABLE_PERFECT_ROUTER"):
        check_sites(find_sites(model_of({"model.layers.2.experts": MoE()})), separate=False)


def test_layers_of_a_class_that_nobody_has_read_are_captured_singly() -> None:
    [site] = find_sites(model_of({"model.layers.2.experts": MoE()}))
    assert site.by_layer
