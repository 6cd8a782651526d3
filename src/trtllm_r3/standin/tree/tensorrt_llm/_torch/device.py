"""The device the engine runs on."""

from __future__ import annotations

import os

import torch

_VARIABLE = "TLLM_STANDIN_DEVICE"


def get_device() -> torch.device:
    """CUDA where there is one, else CPU; TLLM_STANDIN_DEVICE=cpu|cuda decides. ValueError for others."""
    wanted = os.environ.get(_VARIABLE)
    if wanted not in (None, "", "cpu", "cuda"):
        raise ValueError(f"{_VARIABLE}={wanted!r}: expected cpu or cuda")
    if wanted == "cpu" or not (wanted or torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
