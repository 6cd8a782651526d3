"""What a checkpoint's own files say of it, without loading it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .engine import Engine

_FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json")


def made_with(name: Engine, model: Path, sampling: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """What decides the content of the answers; options that only decide the speed are left out."""
    files = {f: _digest(model / f) for f in _FILES if (model / f).is_file()}
    weights = {f.name: f.stat().st_size for f in sorted(model.glob("*.safetensors"))}
    return {"engine": str(name), "model": {**files, **weights}, "sampling": dict(sampling), "seed": seed}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def vocabulary(model: Path) -> int | None:
    """Number of token ids that the model knows, if its configuration says."""
    size = _config(model).get("vocab_size")
    return size if isinstance(size, int) else None


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return {**config, **config.get("text_config", {})}


def without_tokenizer(model: Path) -> dict[str, Any]:
    """Sampling options that an LLM without tokenizer needs: which token ends an answer."""
    end = _config(model).get("eos_token_id")
    return {"end_id": end[0] if isinstance(end, list) else -1 if end is None else end}
