"""Captures and replays the decode step of the engine, one graph per batch size."""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from .cpu_graph import CpuGraph, CpuGraphPool

CUDA_GRAPH_DUMMY_REQUEST_ID = (1 << 64) - 1
"""Request id of the dummy that fills batches up."""

KeyType: TypeAlias = tuple[int, int, bool, bool]
"""(batch size, draft tokens, first draft, short sequences): all but the first are constant here."""


class CUDAGraphRunner:
    """Graphs of an engine for batches that only decode, all in one memory pool.

    `supported_batch_sizes` are those of the engine, ascending. `graph_metadata[key]["attn_metadata"]` is what
    the engine must fill before `capture` and `replay` of a key; `graph_outputs[key]` is what they return.
    """

    WARMUP_STEPS = 2

    def __init__(self, engine: Any) -> None:
        self.engine_ref = weakref.ref(engine)
        config = engine.llm_args.cuda_graph_config
        sizes = [] if config is None else list(engine._cuda_graph_batch_sizes)
        self.supported_batch_sizes: list[int] = sizes
        self.max_supported_batch_size = max(sizes, default=0)
        self.enabled = bool(sizes)
        self.padding_enabled = self.enabled and bool(config.enable_padding)
        self.graphs: dict[KeyType, Any] = {}
        self.graph_outputs: dict[KeyType, Any] = {}
        self.graph_metadata: dict[KeyType, dict[str, Any]] = {}
        self.memory_pool: Any = None
        self.padding_dummy_request: Any = None
        self.shared_static_tensors = _static_tensors(self.max_supported_batch_size, engine.device)

    def get_graph_key(self, batch: Any) -> KeyType:
        """The key of a batch, supported or not."""
        return (len(batch.generation_requests), 0, False, False)

    def maybe_get_cuda_graph(self, batch: Any) -> KeyType | None:
        """The key of the graph for a batch, with its metadata made; None if the batch must run eagerly.

        That is: graphs are off, the batch is empty or has prompts in it, or its size is not supported.
        """
        key = self.get_graph_key(batch)
        if not self.enabled or batch.context_requests or key[0] not in self.supported_batch_sizes:
            return None
        if key not in self.graph_metadata:
            metadata = self._engine().attn_metadata.create_cuda_graph_metadata(key[0])
            self.graph_metadata[key] = {"attn_metadata": metadata, "spec_metadata": None}
        return key

    def needs_capture(self, key: KeyType) -> bool:
        """Whether there is no graph of this key yet."""
        return key not in self.graph_outputs

    def get_graph_pool(self) -> Any:
        """The memory pool of all graphs, None before the first capture."""
        return self.memory_pool

    def capture(
        self, key: KeyType, forward_fn: Callable[[dict[str, Any]], Any], initial_inputs: dict[str, Any]
    ) -> None:
        """Run `forward_fn(inputs)` twice, then record it.

        `initial_inputs` has `input_ids` int32 `[B]`, `position_ids` int32 `[1, B]` and what else the forward
        takes; `forward_fn` gets it with the ids and positions in static buffers.
        """
        inputs = {**initial_inputs, **self._fill_static_tensors(key, initial_inputs)}
        metadata = inputs.setdefault("attn_metadata", self._metadata(key))
        self.graph_metadata[key] = {"attn_metadata": metadata, "spec_metadata": None}
        for _ in range(self.WARMUP_STEPS):
            forward_fn(inputs)
        graph, capturing = self._new_graph()
        with capturing:
            output = forward_fn(inputs)
        self.graphs[key], self.graph_outputs[key] = graph, output
        self.memory_pool = graph.pool()

    def replay(self, key: KeyType, current_inputs: dict[str, Any]) -> Any:
        """Run the graph of a key on `current_inputs`; the output is valid until the next replay.

        KeyError without a graph. ValueError if the inputs do not fit it or come with metadata of their own.
        """
        graph, metadata = self.graphs[key], self._metadata(key)
        if current_inputs.get("attn_metadata", metadata) is not metadata:
            raise ValueError(f"attn_metadata is not the one that the graph {key} was captured with")
        self._fill_static_tensors(key, current_inputs)
        graph.replay()
        return self.graph_outputs[key]

    @contextlib.contextmanager
    def pad_batch(
        self, scheduled_requests: Any, resource_manager: Any, runtime_draft_len: int = 0
    ) -> Iterator[Any]:
        """Within, decode requests are filled up to the next supported size where that is possible.

        The same dummy request is appended as often as needed.
        """
        requests = scheduled_requests.generation_requests
        padding = self._get_padded_batch(scheduled_requests, resource_manager)
        size = len(requests)
        requests.extend([self.padding_dummy_request] * padding)
        try:
            yield scheduled_requests
        finally:
            del requests[size:]

    def clear(self) -> None:
        """Drop all graphs, their outputs, metadata and memory, and the dummy request."""
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()
        self.graph_outputs.clear()
        self.graph_metadata.clear()
        self.padding_dummy_request = None
        self.memory_pool = None

    def _get_padded_batch(self, batch: Any, resource_manager: Any) -> int:
        """How many dummies to append, 0 if the batch is to stay as it is."""
        size, engine = len(batch.generation_requests), self._engine()
        if not self.padding_enabled or batch.context_requests or not size:
            return 0
        padded = self._round_up_batch_size(size)
        if padded <= size or padded > engine.batch_size:
            return 0
        if self.padding_dummy_request is None:
            manager = resource_manager.get_resource_manager(engine.kv_cache_manager_key)
            self.padding_dummy_request = _dummy_request(manager)
        return 0 if self.padding_dummy_request is None else padded - size

    def _round_up_batch_size(self, batch_size: int) -> int:
        """The smallest supported size that holds the batch, 0 if there is none."""
        index = bisect.bisect_left(self.supported_batch_sizes, batch_size)
        return self.supported_batch_sizes[index] if index < len(self.supported_batch_sizes) else 0

    def _new_graph(self) -> tuple[Any, contextlib.AbstractContextManager[Any]]:
        """A graph in the shared pool, and the context to record it in."""
        if torch.device(self._engine().device).type == "cuda":
            graph = torch.cuda.CUDAGraph()
            return graph, torch.cuda.graph(graph, pool=self.memory_pool)
        recording = CpuGraph(self.memory_pool or CpuGraphPool())
        return recording, recording.capture()

    def _fill_static_tensors(self, key: KeyType, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The static buffers of a key, with the inputs in them."""
        static = {name: buffer[..., : key[0]] for name, buffer in self.shared_static_tensors.items()}
        for name, buffer in static.items():
            if inputs[name].shape != buffer.shape:
                raise ValueError(f"{name} {tuple(inputs[name].shape)} does not fit the graph {key}")
            buffer.copy_(inputs[name], non_blocking=True)
        return static

    def _metadata(self, key: KeyType) -> Any:
        return self.graph_metadata.get(key, {}).get("attn_metadata")

    def _engine(self) -> Any:
        engine = self.engine_ref()
        if engine is None:
            raise RuntimeError("the engine of these graphs is gone")
        return engine


def _static_tensors(max_tokens: int, device: Any) -> dict[str, torch.Tensor]:
    """Inputs that all graphs read, sliced to their size."""
    with torch.inference_mode(False):
        return {
            "input_ids": torch.ones(max_tokens, dtype=torch.int32, device=device),
            "position_ids": torch.zeros(1, max_tokens, dtype=torch.int32, device=device),
        }


def _dummy_request(kv_cache_manager: Any) -> Any:
    """A request to pad with, None if the cache has no block for it."""
    requests = kv_cache_manager.add_dummy_requests([CUDA_GRAPH_DUMMY_REQUEST_ID], is_gen=True)
    if not requests:
        return None
    requests[0].is_cuda_graph_dummy = True
    return requests[0]
