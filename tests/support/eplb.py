"""A MoE layer of the stand-in with and without an expert load balancer."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.modules.fused_moe import RenormalizeMoeRoutingMethod, create_moe
from tensorrt_llm._torch.modules.fused_moe.moe_load_balancer import maybe_create_moe_load_balancer
from tensorrt_llm.llmapi import MoeLoadBalancerConfig

HIDDEN, INNER, EXPERTS, TOP_K, SLOTS = 16, 32, 6, 3, 9
PLACED = [3, 0, 5, 0, 1, 4, 0, 2, 0]


def weights() -> dict[str, torch.Tensor]:
    """Experts of the layer as a checkpoint holds them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}
    return {
        f"{e}.{name}.weight": torch.randn(*shape, generator=generator) * 0.3
        for e in range(EXPERTS)
        for name, shape in shapes.items()
    }


def layer(balancer: MoeLoadBalancerConfig | None = None, **options: Any) -> tuple[Any, Any]:
    """The layer and the load balancer that it takes part in."""
    config = ModelConfig(moe_load_balancer=balancer, **options)
    with maybe_create_moe_load_balancer(config, None) as active:
        method = RenormalizeMoeRoutingMethod(TOP_K)
        moe = create_moe(method, EXPERTS, HIDDEN, INNER, torch.float32, model_config=config, layer_idx=4)
    moe.load_weights([weights()])
    return moe, active


def placed(updates: int = 0, slots: list[int] | None = None) -> MoeLoadBalancerConfig:
    """Options that put the experts where `slots` says, by default PLACED."""
    assigned = {4: PLACED if slots is None else slots}
    return MoeLoadBalancerConfig(
        num_slots=len(assigned[4]), initial_global_assignments=assigned, layer_updates_per_iter=updates
    )


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and router logits of so many rows."""
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
