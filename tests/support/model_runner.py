"""Runs a model of the stand-in step by step, with a KV cache of scattered blocks and no engine around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensorrt_llm._torch.attention_backend import AttentionMetadata
from tensorrt_llm._torch.metadata import KVCacheParams
from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.models import AutoModelForCausalLM, load_weights
from tensorrt_llm._torch.utils import model_extra_attrs


class ScatteredCache:
    """The part of a KV cache manager that models use; blocks come in a shuffled order, full of nan."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokens_per_block: int = 4,
        num_blocks: int = 512,
        max_seq_len: int = 512,
    ) -> None:
        layers, heads, width, dtype = model_config.kv_cache_spec()
        self.tokens_per_block = tokens_per_block
        self.max_blocks_per_seq = -(-max_seq_len // tokens_per_block)
        self.pool = torch.full(
            (layers, num_blocks, 2, tokens_per_block, heads, width), float("nan"), dtype=dtype
        )
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.blocks: dict[int, list[int]] = {}

    def reserve(self, request_id: int, tokens: int) -> None:
        """Blocks for so many tokens of a request."""
        blocks = self.blocks.setdefault(request_id, [])
        while len(blocks) * self.tokens_per_block < tokens:
            blocks.append(self.free.pop())

    def get_buffers(self, layer_idx: int) -> torch.Tensor:
        """The cache of a layer."""
        return self.pool[layer_idx]

    def get_batch_cache_indices(self, request_ids: Sequence[int]) -> list[list[int]]:
        """Block ids of each request."""
        return [self.blocks[request_id] for request_id in request_ids]


class ModelRunner:
    """A loaded model and the sequences it has seen."""

    def __init__(self, path: str, **options: Any) -> None:
        cache_options = {
            name: options.pop(name) for name in ("tokens_per_block", "num_blocks") if name in options
        }
        self.model_config = ModelConfig.from_pretrained(path, **options)
        self.model = AutoModelForCausalLM.from_config(self.model_config).eval()
        self.model.load_weights(load_weights(path))
        self.cache = ScatteredCache(self.model_config, **cache_options)
        self.seen: dict[int, int] = {}
        self.metadata = AttentionMetadata(
            max_num_requests=64, max_num_tokens=4096, kv_cache_manager=self.cache
        )

    def prepare(
        self,
        chunks: dict[int, Sequence[int]],
        generations: dict[int, int],
        metadata: AttentionMetadata | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Metadata for a step of prompt chunks and single tokens by sequence; its (ids, positions)."""
        metadata = metadata or self.metadata
        rows = {
            **{key: list(value) for key, value in chunks.items()},
            **{key: [token] for key, token in generations.items()},
        }
        cached = [self.seen.get(key, 0) for key in rows]
        for key, start in zip(rows, cached, strict=True):
            self.seen[key] = start + len(rows[key])
            self.cache.reserve(key, self.seen[key])
        metadata.request_ids, metadata.num_contexts = list(rows), len(chunks)
        metadata.seq_lens = torch.tensor([len(row) for row in rows.values()], dtype=torch.int32)
        metadata.kv_cache_params = KVCacheParams(use_cache=True, num_cached_tokens_per_seq=cached)
        metadata.prepare()
        ids = torch.tensor([token for row in rows.values() for token in row], dtype=torch.int32)
        places = [
            start + i for start, row in zip(cached, rows.values(), strict=True) for i in range(len(row))
        ]
        return ids, torch.tensor([places], dtype=torch.int32)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        everything: bool = False,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Logits of the prepared step."""
        with torch.inference_mode(), model_extra_attrs(self.model_config.extra_attrs):
            logits: torch.Tensor = self.model.forward(
                metadata or self.metadata, ids, positions, return_context_logits=everything
            )
        return logits

    def step(
        self,
        chunks: dict[int, Sequence[int]] | None = None,
        generations: dict[int, int] | None = None,
        everything: bool = False,
    ) -> torch.Tensor:
        """Logits of one step of prompt chunks and single tokens by sequence."""
        return self.forward(*self.prepare(chunks or {}, generations or {}), everything)


def record_routes(model: torch.nn.Module) -> dict[int, list[torch.Tensor]]:
    """From now on the ids `[rows, K]` of each call of `apply`, by decoder layer."""
    calls: dict[int, list[torch.Tensor]] = {}
    for path, module in model.named_modules():
        if path.endswith(".experts") and hasattr(module, "routing_method"):
            calls[int(path.split(".")[2])] = _record(module.routing_method)
    return calls


def _record(method: Any) -> list[torch.Tensor]:
    original, seen = method.apply, []

    def apply(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, scales = original(logits)
        assert ids.dtype == torch.int32
        seen.append(ids.clone())
        return ids, scales

    method.apply = apply
    return seen
