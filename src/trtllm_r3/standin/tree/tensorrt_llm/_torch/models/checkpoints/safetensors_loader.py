"""Weights of a Hugging Face checkpoint directory, of one or several safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_weights(checkpoint_dir: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint by name, on CPU, in the dtypes of the files.

    ValueError if there is no safetensors file, or a file or tensor that the index names is lacking.
    """
    root = Path(checkpoint_dir)
    index = root / _INDEX
    if index.is_file():
        return _load_indexed(root, json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    files = [root / _SINGLE] if (root / _SINGLE).is_file() else sorted(root.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors file in {root}; other weight formats are not supported")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _load_indexed(root: Path, places: dict[str, str]) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name in sorted(set(places.values())):
        if not (root / name).is_file():
            raise ValueError(f"{root / _INDEX} names {name}, which is not there")
        weights.update(load_file(root / name))
    lacking = sorted(places.keys() - weights.keys())
    if lacking:
        raise ValueError(f"tensors of the index that no file of {root} has: {lacking[:4]}")
    return weights
