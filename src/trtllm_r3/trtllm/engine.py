"""One engine that captures: its recorder, its hooked layers, and what it may be asked."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

from ..config import Config
from ..errors import UnsupportedError, explain
from ..flow.recorder import RouteRecorder, Track
from .blocks import KvBlocks, pool_tokens
from .routing import listen
from .runtime import runtime
from .sites import Site, check_sites, find_sites

log = logging.getLogger("trtllm_r3")
ATTRIBUTE = "_trtllm_r3"  # on the model engine: the CapturedEngine; on a request: its Track


class CapturedEngine:
    """Lives on the model engine, so that the engine that estimates memory and the final one share it."""

    def __init__(self, model_engine: Any, config: Config) -> None:
        self.config = config
        self.sites: list[Site] = find_sites(model_engine.model)
        if not self.sites:
            raise UnsupportedError(
                explain(
                    what=type(model_engine.model).__name__,
                    expected="a model with MoE layers",
                    found="none",
                    remedy="Build the LLM without enable_return_routed_experts.",
                )
            )
        check_sites(self.sites, separate=config.fused == "separate")
        self.recorder = RouteRecorder(
            moe_layer_ids=[site.layer_id for site in self.sites],
            top_k=self.sites[0].top_k,
            num_experts=self.sites[0].num_experts,
            max_rows=_rows_of_largest_forward(model_engine),
            device=next(model_engine.model.parameters()).device,
            mode=config.capture,
            staging_slots=config.staging_slots,
        )
        self.recorder.epoch = runtime().weight_version
        self.recorder.counters["pid"] = os.getpid()
        capturer = self.recorder.capturer
        capturer.by_layer.update(site.ordinal for site in self.sites if site.by_layer)
        self.blocks: KvBlocks | None = None
        self._admitted: list[tuple[weakref.ref[Any], Track]] = []
        self._undo: list[Callable[[], None]] = listen(self.sites, self)
        runtime().engines.add(self)

    def warming_up(self) -> None:
        """The forwards that follow are dummies: what they show of each layer is checked."""
        self.recorder.capturer.checking = True

    def warmed_up(self) -> None:
        """Warm-up is over: from what it showed, refuse layers that do not report all of their rows."""
        capturer = self.recorder.capturer
        capturer.checking = False
        if self.recorder.degraded:
            log.error("routes are not captured: %s", self.recorder.degraded)
            return
        for ordinal, reason in sorted(capturer.uncovered.items()):
            site = self.sites[ordinal]
            raise UnsupportedError(
                explain(
                    what=f"MoE layer {site.name} ({type(site.module).__name__})",
                    expected="each row of a forward to go through routing_method.apply once",
                    found=reason,
                    remedy='Choose moe_config=MoeConfig(backend="CUTLASS") or build the LLM without routes.',
                )
            )

    def share_blocks(self, managers: Any) -> None:
        """An executor with these resource managers is built; the KV cache of an earlier one is gone."""
        self.recorder.store.reserve(pool_tokens(managers))
        self.blocks = KvBlocks.of(managers)
        cap, blocks, cache = self.config.shared_cache_tokens, self.blocks, None
        if blocks is not None and cap != 0:
            count = blocks.count if cap < 0 else min(blocks.count, cap // blocks.tokens_per_block)
            cache = self.recorder.make_cache(
                blocks=count, tokens_per_block=blocks.tokens_per_block, complete=count == blocks.count
            )
        self.recorder.share(cache)

    def forget_prefixes(self) -> None:
        """The engine's KV cache forgot its content. Called from any thread."""
        if self.recorder.cache is not None:
            self.recorder.cache.new_kv_epoch()

    def wants(self, request: Any) -> bool:
        """Whether rows of this request are of use: it asked, or later requests may hit its KV blocks."""
        if request.is_dummy:
            return False
        asked = getattr(request, "py_return_routed_experts", False)
        return bool(asked or self.recorder.cache is not None)

    def admit(self, request: Any, position: int) -> Track:
        """A request is computed for the first time, from `position` on."""
        self._sweep()
        track = self.recorder.open(
            start=getattr(request, "py_routed_experts_start", 0),
            position=position,
            asked=bool(getattr(request, "py_return_routed_experts", False)),
        )
        setattr(request, ATTRIBUTE, track)
        self._admitted.append((weakref.ref(request), track))
        self._lend(request, track, position)
        return track

    def resume(self, request: Any, track: Track, position: int) -> None:
        """A paused request is computed again."""
        self.recorder.resume(track, kept_tokens=request.prompt_len, position=position)
        self._lend(request, track, position)

    def _lend(self, request: Any, track: Track, position: int) -> None:
        if self.blocks is None or self.recorder.cache is None:
            return
        self.recorder.lend(
            track,
            scope=self.blocks.scope(request),
            blocks=self.blocks.ids(request),
            tokens=request.get_tokens(0),
            position=position,
        )

    def grow(self, request: Any, track: Track, position: int) -> None:
        """A generation row at `position`: at the start of a block the request has got a new one."""
        lease, blocks = track.lease, self.blocks
        if lease and blocks and position // blocks.tokens_per_block >= len(lease.blocks):
            self.recorder.extend(track, blocks.ids(request))

    def _sweep(self) -> None:
        """Release what the engine dropped without a word: errors and time-outs free no request by name."""
        if len(self._admitted) < 2 * self.recorder.store.live + 256:
            return
        gone = [track for request, track in self._admitted if request() is None]
        for track in gone:
            self.recorder.release(track)
        self._admitted = [(r, t) for r, t in self._admitted if r() is not None and not t.released]

    def track_of(self, request: Any) -> Track | None:
        """What the recorder knows of a request; None if it was never computed or its rows are of no use."""
        track: Track | None = getattr(request, ATTRIBUTE, None)
        return track

    def detach(self) -> None:
        """Stop capturing for good; requests in flight keep the rows they have."""
        self.recorder.stop("switched off")
        while self._undo:
            self._undo.pop()()
        runtime().engines.discard(self)

    def status(self) -> dict[str, Any]:
        """Plain values for `trtllm_r3.status()`."""
        recorder = self.recorder
        return {
            "moe_layers": len(self.sites),
            "moe_layer_ids": list(recorder.moe_layer_ids),
            "top_k": recorder.capturer.top_k,
            "num_experts": recorder.num_experts,
            "layers_captured_singly": sorted(recorder.capturer.by_layer),
            "degraded": recorder.degraded,
            "live_requests": recorder.store.live,
            "pages_used": recorder.store.pages_used,
            "host_bytes": recorder.store.nbytes,
            "shared_cache_bytes": 0 if recorder.cache is None else recorder.cache.nbytes,
            "counters": dict(recorder.counters),
        }


def _rows_of_largest_forward(model_engine: Any) -> int:
    """Tokens of the largest step, or the largest padded graph if that is more."""
    graph = getattr(model_engine, "_max_cuda_graph_batch_size", 0) or 0
    return max(int(model_engine.max_num_tokens), int(graph))


def captured(model_engine: Any) -> CapturedEngine | None:
    """The CapturedEngine of a model engine, if it has one."""
    found: CapturedEngine | None = getattr(model_engine, ATTRIBUTE, None)
    return found
