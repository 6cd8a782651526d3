"""Puts the tensors of a checkpoint where the modules keep them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Protocol, cast

import torch
from torch import nn

from ..modules.fused_moe import MoE, MoEWeightLoadingMode, VanillaMoE
from ..modules.linear import Linear

_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_EXPERT = re.compile(r"^(\d+)\.(\w+)\.weight$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


class _Experts(Protocol):
    weight_loading_mode: MoEWeightLoadingMode

    def load_weights(
        self, weights: list[dict[str, torch.Tensor]], allow_partial_loading: bool = False
    ) -> None:
        """Fill the experts."""


def load_model_weights(
    model: nn.Module, weights: Mapping[str, torch.Tensor], num_layers: int, partial: bool
) -> None:
    """Fill all parameters of `model` in place. ValueError as for `DecoderModelForCausalLM.load_weights`."""
    left = {name: tensor for name, tensor in weights.items() if not _is_ignored(name, num_layers)}
    with torch.no_grad():
        experts = _load_experts(model, left, partial)
        lacking = [name for name in _load_parameters(model, left, experts) if not partial]
    if "lm_head.weight" in left and "lm_head.weight" not in dict(model.named_parameters()):
        del left["lm_head.weight"]
    if left or lacking:
        raise ValueError(
            f"weights do not fit {type(model).__name__}: unknown {sorted(left)[:4]},"
            f" lacking {sorted(lacking)[:4]}"
        )


def _is_ignored(name: str, num_layers: int) -> bool:
    layer = _LAYER.match(name)
    return (layer is not None and int(layer[1]) >= num_layers) or name.endswith("rotary_emb.inv_freq")


def _load_experts(model: nn.Module, left: dict[str, torch.Tensor], partial: bool) -> tuple[str, ...]:
    """Fill the experts, take their tensors out of `left`, return the prefixes of their parameters."""
    prefixes = []
    for path, module in model.named_modules():
        if not isinstance(module, MoE | VanillaMoE) or path.endswith(".backend"):
            continue
        prefix = path + "."
        prefixes.append(prefix)
        given = {name.removeprefix(prefix): left.pop(name) for name in list(left) if name.startswith(prefix)}
        if given or not partial:
            _load_layer_experts(cast("_Experts", module), given, partial)
    return tuple(prefixes)


def _load_layer_experts(module: _Experts, given: dict[str, torch.Tensor], partial: bool) -> None:
    stacked = {"gate_up_proj", "down_proj"} & given.keys()
    module.weight_loading_mode = (
        MoEWeightLoadingMode.FUSED_GATE_UP_PROJ if stacked else MoEWeightLoadingMode.VANILLA
    )
    module_backend = getattr(module, "backend", None)
    if module_backend is not None:
        module_backend.weight_loading_mode = module.weight_loading_mode
    module.load_weights(
        [given if stacked else {_expert_key(name): value for name, value in given.items()}], partial
    )


def _expert_key(name: str) -> str:
    found = _EXPERT.match(name)
    if found is None or found[2] not in _EXPERT_NAMES:
        return name
    return f"{found[1]}.{_EXPERT_NAMES[found[2]]}.weight"


def _load_parameters(model: nn.Module, left: dict[str, torch.Tensor], experts: tuple[str, ...]) -> list[str]:
    """Fill what is not an expert, take the tensors out of `left`, return the names that lack."""
    lacking = []
    for name, target in _targets(model):
        if name.startswith(experts):
            continue
        value = left.pop(name, None)
        if value is None:
            lacking.append(name)
        elif value.shape != target.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {tuple(target.shape)}")
        else:
            target.copy_(value)
    return lacking


def _targets(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter, or each part of a stacked one, under its name in a checkpoint."""
    for name, parameter in model.named_parameters():
        module_path, _, leaf = name.rpartition(".")
        parent, _, module_name = module_path.rpartition(".")
        if module_name not in _STACKED:
            yield name, parameter.data
            continue
        linear = model.get_submodule(module_path)
        assert isinstance(linear, Linear)
        for part, rows in zip(_STACKED[module_name], parameter.data.split(linear.parts), strict=True):
            yield f"{parent}.{part}.{leaf}", rows
