"""Rows of a MoE layer in chunks, even ones on a second stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...device import get_device
from ...model_config import ModelConfig
from ...utils import AuxStreamType, EventType

RunChunk = Callable[[torch.Tensor, torch.Tensor, bool, bool], torch.Tensor]


class ChunkRunner:
    """Splits rows into chunks of at most `max_num_tokens` and joins what comes of them.

    Chunks are views of the tensors given. The second stream exists on CUDA only, and only where the limit is
    lower than what a step can hold.
    """

    def __init__(self, model_config: ModelConfig, aux_stream_dict: dict[AuxStreamType, Any] | None) -> None:
        assert model_config.moe_max_num_tokens is not None
        self.max_num_tokens = model_config.moe_max_num_tokens
        self.aux_stream: Any = None
        self.event_dict: dict[EventType, Any] | None = None
        whole_step = model_config.max_num_tokens * model_config.mapping.dp_size
        if self.max_num_tokens < whole_step and get_device().type == "cuda":
            self.aux_stream = (
                aux_stream_dict[AuxStreamType.MoeChunkingOverlap] if aux_stream_dict else torch.cuda.Stream()
            )
            self.event_dict = {
                key: torch.cuda.Event() for key in (EventType.Main, EventType.MoeChunkingOverlap)
            }

    def count(self, rows: int) -> int:
        """Number of chunks for so many rows, at least 1."""
        return max(1, -(-rows // self.max_num_tokens))

    @staticmethod
    def split(rows: int, chunks: int) -> list[int]:
        """Sizes of the chunks, the first `rows % chunks` larger by one."""
        size, extra = divmod(rows, chunks)
        return [size + 1] * extra + [size] * (chunks - extra)

    def run(self, x: torch.Tensor, router_logits: torch.Tensor, run_chunk: RunChunk) -> torch.Tensor:
        """`run_chunk(rows, logits, is_first, is_last)` for each chunk, the results one behind the other."""
        chunks = self.count(x.shape[0])
        if chunks == 1:
            return run_chunk(x, router_logits, True, True)
        sizes = self.split(x.shape[0], chunks)
        outputs = []
        self._fork()
        for index, (rows, logits) in enumerate(zip(x.split(sizes), router_logits.split(sizes), strict=True)):
            with self._stream(index):
                outputs.append(run_chunk(rows, logits, index == 0, index == chunks - 1))
        self._join()
        return torch.cat(outputs)

    def _stream(self, index: int) -> AbstractContextManager[Any]:
        if self.aux_stream is None or index % 2:
            return nullcontext()
        return torch.cuda.stream(self.aux_stream)

    def _fork(self) -> None:
        if self.event_dict is not None:
            self.event_dict[EventType.Main].record()
            with torch.cuda.stream(self.aux_stream):
                self.event_dict[EventType.Main].wait()

    def _join(self) -> None:
        if self.event_dict is not None:
            with torch.cuda.stream(self.aux_stream):
                self.event_dict[EventType.MoeChunkingOverlap].record()
            self.event_dict[EventType.MoeChunkingOverlap].wait()
