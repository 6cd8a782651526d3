"""Weights from disk."""

from .safetensors_loader import load_weights

__all__ = ["load_weights"]
