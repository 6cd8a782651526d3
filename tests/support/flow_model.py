"""The MoE layers of one forward: they call a capturer as the hooks on a real model do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from support.flow_oracle import Shape
from trtllm_r3.flow.capturer import RouteCapturer


@dataclass(frozen=True)
class Run:
    """How a forward runs its layers; the defaults are a forward without any fault."""

    chunk: int = 0  # rows of a MoE chunk; 0: all in one call
    chunk_order: int = 1  # 2: even chunks first, as on two streams; -1: last chunk first
    copies: bool = False  # each chunk's logits are a copy of their own
    rerun_first: bool = False  # an empty chunk is replaced by chunk 0
    padding: int = 0  # rows of a padded graph, behind the real ones
    foreign: int = 0  # rows that belong to other ranks, behind the local ones
    silent: tuple[int, ...] = ()  # layers that never ask their routing method
    skipped: tuple[int, ...] = ()  # layers that do not run at all
    twice: tuple[int, ...] = ()  # layers that run two times
    stop_before: int | None = None  # the forward raises before this layer


def capturer_of(shape: Shape, mode: str = "step") -> RouteCapturer:
    """A capturer on the CPU for a fake model."""
    return RouteCapturer(
        max_rows=shape.max_rows,
        layers=shape.layers,
        top_k=shape.top_k,
        num_experts=shape.experts,
        device=torch.device("cpu"),
        mode=mode,
    )


def forward(capturer: RouteCapturer, ids_NLK: torch.Tensor, run: Run = Run()) -> None:
    """All layers in order. `ids_NLK`: what the routers choose, integer [N, L, K]."""
    extra = run.padding + run.foreign
    if extra:
        ids_NLK = torch.cat([ids_NLK, ids_NLK.new_zeros(extra, *ids_NLK.shape[1:])])
    local = len(ids_NLK) - run.foreign
    for layer in range(ids_NLK.shape[1]):
        if layer == run.stop_before:
            raise RuntimeError("out of memory")
        for _ in range((layer not in run.skipped) + (layer in run.twice)):
            layer_forward(capturer, layer, ids_NLK[:, layer].clone(), local, run)


def layer_forward(
    capturer: RouteCapturer, layer: int, ids_NK: torch.Tensor, local: int, run: Run = Run()
) -> None:
    """One MoE layer: entry, the router on each chunk of the logits, exit."""
    logits = torch.zeros(len(ids_NK), capturer.num_experts)
    capturer.enter(layer, logits, local)
    if layer not in run.silent:
        for first, last in chunks_of(len(ids_NK), run):
            part = logits[first:last].clone() if run.copies else logits[first:last]
            capturer.hear(ids_NK[first:last].clone(), part)
    capturer.leave()


def chunks_of(rows: int, run: Run) -> Sequence[tuple[int, int]]:
    """(first, one past the last) row of each router call."""
    size = run.chunk or max(rows, 1)
    parts = [(a, min(a + size, rows)) for a in range(0, rows, size)] or [(0, 0)]
    if run.chunk_order == 2:
        parts = parts[::2] + parts[1::2]
    elif run.chunk_order == -1:
        parts = parts[::-1]
    return [*parts, parts[0]] if run.rerun_first else parts
