"""The second oracle: each forward has a number that is mixed into its ids, and each KV slot remembers the
forward that wrote it, through copies. A row must be that of the forward that computed it, or that wrote the
KV which the request hit; a function of tokens and positions alone cannot tell them apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import trtllm_r3

from .oracle import expected_ids


class Nonces:
    """Watches one engine in this process. Install it before the engine is built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tensorrt_llm._torch.pyexecutor.kv_cache_manager import KVCacheManager
        from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine

        self.forwards = 0
        self.slots: dict[tuple[int, int], int] = {}  # (block, offset) -> forward that wrote the KV there
        self.rows: dict[int, dict[int, int]] = defaultdict(dict)  # client id -> position -> forward
        self.hits: dict[int, set[int]] = defaultdict(set)
        prepare, copy = PyTorchModelEngine._prepare_inputs, KVCacheManager._copy_block

        def watched_prepare(engine: Any, batch: Any, metadata: Any, tokens: Any) -> Any:
            inputs = prepare(engine, batch, metadata, tokens)
            if not engine.is_warmup:
                self._step(engine, batch, metadata)
            return inputs

        def watched_copy(manager: Any, source: int, target: int, tokens: int) -> None:
            copy(manager, source, target, tokens)
            for offset in range(tokens):
                self.slots[target, offset] = self.slots[source, offset]

        monkeypatch.setattr(PyTorchModelEngine, "_prepare_inputs", watched_prepare)
        monkeypatch.setattr(KVCacheManager, "_copy_block", watched_copy)

    def _step(self, engine: Any, batch: Any, metadata: Any) -> None:
        self.forwards += 1
        with torch.inference_mode():
            engine.model.model.weight_version.fill_(self.forwards)
        manager = metadata.kv_cache_manager
        size, requests = manager.tokens_per_block, {r.py_request_id: r for r in batch.all_requests()}
        cached = metadata.kv_cache_params.num_cached_tokens_per_seq
        for rid, first, count in zip(metadata.request_ids, cached, metadata.seq_lens.tolist(), strict=True):
            request = requests.get(rid)
            if request is None or request.is_dummy:
                continue
            blocks = manager.get_batch_cache_indices([rid])[0]
            rows = self.rows[request.client_id]
            if request.is_context_init_state and request.is_first_context_chunk:
                for position in [p for p in rows if p >= request.prompt_len - 1]:
                    del rows[position]
                for position in range(first):
                    if position not in rows:
                        rows[position] = self.slots[blocks[position // size], position % size]
                        self.hits[request.client_id].add(position)
            for position in range(first, first + count):
                self.slots[blocks[position // size], position % size] = self.forwards
                rows.setdefault(position, self.forwards)

    def check(self, output: Any, config: Mapping[str, Any]) -> dict[str, int]:
        """Each row that is there is that of its forward; missing ones were hits. Missing rows by cause."""
        routes = self.check_ids(output, config)
        lost = set(np.flatnonzero(routes.missing.numpy()).tolist()) - self.hits[output.request_id]
        assert not lost, f"rows {sorted(lost)} were computed by the request itself and are missing"
        causes: dict[str, int] = defaultdict(int)
        for gap in routes.gaps:
            causes[gap.cause] += gap.stop - gap.start
        return dict(causes)

    def check_ids(self, output: Any, config: Mapping[str, Any]) -> trtllm_r3.Routes:
        """Each row that is there is that of its forward; any may be missing."""
        completion = output.outputs[0]
        routes = trtllm_r3.routes_of(completion)
        tokens = [*output.prompt_token_ids, *completion.token_ids][:-1]
        assert routes.ids is not None
        got = routes.ids.numpy()
        forwards = np.array([self.rows[output.request_id][p] for p in range(len(tokens))], np.int64)
        want = expected_ids(tokens, None, None, config, forwards)
        assert got.shape == want.shape
        missing = routes.missing.numpy()
        wrong = np.flatnonzero(~missing & (got != want).any((1, 2)))
        assert not len(wrong), f"rows {wrong.tolist()} are not those of forwards {forwards[wrong].tolist()}"
        return routes
