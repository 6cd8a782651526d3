"""From the routers to the device buffer: what each layer of a forward reported.

A *pass* is one run through all MoE layers of the model: it opens when the first of them is entered
and closes, with one gather, when all have been left. A forward may hold several passes (eager runs,
a graph capture); a graph replay holds none, its gather was recorded.

R rows of the buffer, N rows of one call, L MoE layers, K experts a token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import ops

log = logging.getLogger(__name__)
_IDLE = "it did not run"
_AGAIN = "it ran more than once in a pass"


@dataclass(slots=True)
class _Visit:
    """One run of one MoE layer: where its logits lie, and which of its rows have been heard."""

    layer: int
    base: torch.Tensor
    local_rows: int
    # (row, count) -> the logits; kept, so that the storage of one that was dropped is no other's meanwhile
    heard: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    trouble: str = ""

    def place(self, logits: torch.Tensor) -> tuple[int, int]:
        """(first row, rows) of a router call; chunks of the base logits are views of its storage."""
        rows, stride = logits.shape[0], logits.stride(0)
        storage = logits.untyped_storage()._cdata
        offset = logits.storage_offset()
        if storage == self.base.untyped_storage()._cdata:
            offset, stride = offset - self.base.storage_offset(), self.base.stride(0)
        row = offset // max(stride, 1) if rows else 0
        count = max(0, min(rows, self.local_rows - row))
        if row < 0:
            self.trouble = "the logits that were routed begin before those that the layer was given"
        before = self.heard.setdefault((row, count), logits)
        if count and before.untyped_storage()._cdata != storage:
            self.trouble = f"rows {row}..{row + count - 1} were routed twice, from two different logits"
        return row, count

    def uncovered(self) -> str:
        """Empty if the rows heard are exactly [0, local rows), else what is wrong."""
        reach = 0
        for row, count in sorted(self.heard):
            if count and row != reach:
                return self.trouble or f"rows {min(row, reach)}.. were reported twice or not at all"
            reach = max(reach, row + count)
        if reach < self.local_rows:
            return (
                self.trouble
                or f"{self.local_rows - reach} of {self.local_rows} rows never went through the router"
            )
        return self.trouble


class RouteCapturer:
    """Writes the ids of a forward's rows into `routes_RLK`, at a fixed address for the engine's life.

    mode "step" keeps references to the ids and gathers them once; "layer" writes each as it comes.
    Layers in `by_layer` are written at once in both modes.
    """

    def __init__(
        self, *, max_rows: int, layers: int, top_k: int, num_experts: int, device: torch.device, mode: str
    ) -> None:
        self.layers, self.top_k, self.num_experts = layers, top_k, num_experts
        dtype = ops.narrow_dtype(num_experts, top_k)
        self.poison = ops.mark(ops.NOT_CAPTURED, top_k)
        with torch.inference_mode(False):
            self.routes_RLK = torch.full((max_rows, layers, top_k), self.poison, dtype=dtype, device=device)
            self.witness_RK = torch.full((max_rows, top_k), self.poison, dtype=dtype, device=device)
        self.by_layer = set(range(layers)) if mode == "layer" else set()
        self.checking = False  # both ways, compared on the host: only while the engine warms up
        self.uncovered: dict[int, str] = {}  # layer -> what was wrong in its last run
        self.passes = self.void_passes = 0
        self._kept: list[tuple[int, int, torch.Tensor]] = []
        self._clones: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._visit: _Visit | None = None
        self._visited: list[int] = []
        self._covered: set[int] = set()
        self._open = self._void = self._any = False
        self._rows = 0  # of each layer of the open pass
        self.pass_rows: int | None = None  # of the last pass of this forward; None: only graphs ran
        self._witness = 0

    @property
    def max_rows(self) -> int:
        """Rows of the largest forward that fits."""
        return self.routes_RLK.shape[0]

    def begin(self) -> None:
        """A forward starts: whatever an earlier one left open is dropped."""
        self._open = False
        self._visit = self.pass_rows = None
        self._visited.clear()

    def enter(self, layer: int, logits: torch.Tensor, local_rows: int) -> None:
        """A MoE layer starts. `logits` [N, E]: those its chunks are views of."""
        first = self._visited[0] if self._visited else layer
        if self._open and layer == first and len(self._visited) > 1:  # the last pass ended early
            self.routes_RLK.fill_(self.poison)
            self._open = False
        # A pass that has closed is followed by one that begins with the same layer, or by a layer run again.
        again = layer in self._visited if self._open else layer != first
        if not self._open:
            self._open_pass()
            self._rows = local_rows
        self._visited.append(layer)
        self._visit = _Visit(layer, logits, local_rows, trouble=_AGAIN if again else "")

    def hear(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        """The router of the current layer chose `ids` [N, K] for the rows of `logits` [N, E]."""
        visit = self._visit
        if visit is None:
            return  # somebody asked a routing method outside of any MoE layer
        row, count = visit.place(logits)
        if ids.ndim != 2 or ids.shape != (logits.shape[0], self.top_k):
            visit.trouble = f"ids of shape {tuple(ids.shape)}, not [{logits.shape[0]}, {self.top_k}]"
        if not count or visit.trouble or row + count > self.max_rows:
            return
        ids = ids[:count] if count < ids.shape[0] else ids
        self._take(visit.layer, row, ids)

    def leave(self) -> None:
        """The current MoE layer returned; after the last one the kept ids are gathered."""
        visit, self._visit = self._visit, None
        if visit is None:
            return
        wrong = visit.uncovered()
        if not wrong and visit.local_rows != self._rows:
            wrong = f"it got {visit.local_rows} rows where the layers before it got {self._rows}"
        if wrong:
            self.uncovered[visit.layer] = wrong
            self._covered.discard(visit.layer)
            self.routes_RLK[:, visit.layer].fill_(self.poison)
        else:
            if not self.checking or self.uncovered.get(visit.layer) == _IDLE:
                self.uncovered.pop(visit.layer, None)
            self._covered.add(visit.layer)
        if len(set(self._visited)) == self.layers:
            self._close_pass()

    def void(self) -> None:
        """Something went wrong inside a hook: nothing of this pass can be trusted."""
        self._void = True

    def rewritten(self, layer: int) -> None:
        """The ids of a layer are written to after routing: from now on they are written down at once.

        What was kept of its current run is no longer what the router chose.
        """
        if layer not in self.by_layer:
            log.warning(
                "MoE layer %d writes to its expert ids after routing; it is captured by itself", layer
            )
            self.by_layer.add(layer)
            self.routes_RLK[:, layer].fill_(ops.mark(ops.CHANGED, self.top_k))

    def _open_pass(self) -> None:
        # Not earlier: an eager forward's ids may still be read by the gather on another stream.
        self._kept.clear()
        self._clones.clear()
        self._visited.clear()
        self._covered.clear()
        self._open, self._void = True, False
        if not self._any:
            self._any, self.uncovered = True, dict.fromkeys(range(self.layers), _IDLE)
        self._witness = self.passes % self.layers

    def _take(self, layer: int, row: int, ids: torch.Tensor) -> None:
        if self._void:
            return
        if layer in self.by_layer:
            ops.capture_layer(self.routes_RLK, ids, layer, row, self.num_experts)
            return
        self._kept.append((layer, row, ids))
        if layer == self._witness:
            ops.capture_layer(self.witness_RK[:, None], ids, 0, row, self.num_experts)
        if self.checking and _host_may_read():
            self._clones.append((layer, ids, ids.clone()))

    def _close_pass(self) -> None:
        self._open = False
        self.passes += 1
        self.pass_rows = self._rows
        self._demote_changed()
        if self._void:
            self.void_passes += 1
            return
        kept = [k for k in self._kept if k[0] in self._covered and k[0] not in self.by_layer]
        if kept:
            kept.sort(key=lambda k: (k[1], k[0]))
            layers, rows, ids = zip(*kept, strict=True)
            ops.capture_step(
                self.routes_RLK, ids, layers, rows, self.witness_RK, self._witness, self.num_experts
            )

    def _demote_changed(self) -> None:
        for layer, ids, clone in self._clones:
            if layer not in self.by_layer and not torch.equal(ids, clone):
                self.rewritten(layer)
        self._clones.clear()


def _host_may_read() -> bool:
    """False while something records the ops of this thread, a CUDA graph for instance."""
    if _get_current_dispatch_mode() is not None:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
