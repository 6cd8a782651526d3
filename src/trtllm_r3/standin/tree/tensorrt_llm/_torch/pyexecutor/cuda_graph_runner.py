"""Generation steps recorded once per batch size and replayed: CUDA graphs on a GPU, recordings on CPU."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..device import get_device
from .cpu_graph import CpuGraph
from .kv_cache_manager import KVCacheManager
from .llm_request import LlmRequest
from .resource_manager import ResourceManagerType
from .streams import on_cuda

if TYPE_CHECKING:
    from .resource_manager import ResourceManager
    from .scheduler import ScheduledRequests

CUDA_GRAPH_DUMMY_REQUEST_ID = (1 << 64) - 1
KeyType = tuple[int, int, bool]  # batch size, draft length, first draft
Inputs = dict[str, Any]


@dataclass(frozen=True)
class CUDAGraphRunnerConfig:
    """What the runner needs to know of the engine; no graphs without batch sizes."""

    cuda_graph_batch_sizes: tuple[int, ...]
    cuda_graph_padding_enabled: bool
    batch_size: int


class CUDAGraphRunner:
    """One graph per batch size, all in one memory pool, each with attention metadata of its own.

    A result is valid until the next replay.
    """

    WARMUP_STEPS = 2

    def __init__(self, config: CUDAGraphRunnerConfig) -> None:
        self.config = config
        self.supported_batch_sizes = sorted(config.cuda_graph_batch_sizes)
        self.enabled = bool(self.supported_batch_sizes)
        self.max_supported_batch_size = max(self.supported_batch_sizes, default=0)
        self.graphs: dict[KeyType, Any] = {}
        self.graph_outputs: dict[KeyType, Any] = {}
        self.graph_metadata: dict[KeyType, Any] = {}
        self.memory_pool: Any = None
        self.padding_dummy_request: LlmRequest | None = None
        self.shared_static_tensors = self._create_shared_static_tensors()

    def _create_shared_static_tensors(self) -> dict[str, torch.Tensor]:
        size = self.max_supported_batch_size
        with torch.inference_mode(False):
            return {
                "input_ids": torch.ones(size, dtype=torch.int32, device=get_device()),
                "position_ids": torch.zeros(1, size, dtype=torch.int32, device=get_device()),
            }

    def get_graph_pool(self) -> Any:
        """The memory that all graphs share, None before the first one."""
        return self.memory_pool

    def maybe_get_cuda_graph(
        self, batch: ScheduledRequests, attn_metadata: Any
    ) -> tuple[Any, KeyType | None]:
        """Metadata and key of the batch's graph, (None, None) if it has to run eagerly."""
        if not (self.enabled and batch.can_run_cuda_graph and batch.batch_size in self.supported_batch_sizes):
            return None, None
        key = (batch.batch_size, 0, False)
        if key not in self.graph_metadata:
            self.graph_metadata[key] = attn_metadata.create_cuda_graph_metadata(batch.batch_size)
        return self.graph_metadata[key], key

    def needs_capture(self, key: KeyType) -> bool:
        """Whether this graph has not been recorded."""
        return key not in self.graph_outputs

    def capture(self, key: KeyType, forward_fn: Callable[[Inputs], Any], initial_inputs: Inputs) -> None:
        """Run a step eagerly a few times, then record it."""
        inputs = {**initial_inputs, **self._fill(key, initial_inputs)}
        for _ in range(self.WARMUP_STEPS):
            forward_fn(inputs)
        self.graphs.pop(key, None)
        graph, output = self._record(forward_fn, inputs)
        self.graphs[key], self.graph_outputs[key] = graph, output
        self.memory_pool = graph.pool()

    def _record(self, forward_fn: Callable[[Inputs], Any], inputs: Inputs) -> tuple[Any, Any]:
        if on_cuda():
            cuda_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(cuda_graph, pool=self.memory_pool):
                output = forward_fn(inputs)
            return cuda_graph, output
        graph = CpuGraph(self.memory_pool)
        with graph.record(_host_tensors(inputs["attn_metadata"])):
            output = forward_fn(inputs)
        return graph, graph.weak(output)

    def replay(self, key: KeyType, current_inputs: Inputs) -> Any:
        """Run the recorded step on new inputs. AssertionError if the metadata is not the graph's own."""
        assert current_inputs["attn_metadata"] is self.graph_metadata[key]
        self._fill(key, current_inputs)
        self.graphs[key].replay()
        return self.graph_outputs[key]

    def _fill(self, key: KeyType, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Copy ids and positions to where the graph reads them; these places."""
        static = {name: tensor[..., : key[0]] for name, tensor in self.shared_static_tensors.items()}
        for name, place in static.items():
            place.copy_(inputs[name], non_blocking=True)
        return static

    @contextlib.contextmanager
    def pad_batch(
        self, batch: ScheduledRequests, resource_manager: ResourceManager
    ) -> Iterator[ScheduledRequests]:
        """Within, the batch is filled up to a recorded size with one dummy, repeated."""
        size = self._get_padding(batch)
        manager = resource_manager.get_resource_manager(ResourceManagerType.KV_CACHE_MANAGER)
        if not size or manager.get_num_free_blocks() < 1:
            yield batch
            return
        dummy = self.padding_dummy_request = self._take_dummy(manager)
        batch.generation_requests.extend([dummy] * size)
        try:
            yield batch
        finally:
            del batch.generation_requests[-size:]
            manager.free_resources(dummy)

    def _get_padding(self, batch: ScheduledRequests) -> int:
        size = batch.batch_size
        if not (
            self.enabled and self.config.cuda_graph_padding_enabled and size and batch.can_run_cuda_graph
        ):
            return 0
        place = bisect.bisect_left(self.supported_batch_sizes, size)
        padded = self.supported_batch_sizes[place] if place < len(self.supported_batch_sizes) else 0
        return max(padded - size, 0) if padded <= self.config.batch_size else 0

    def _take_dummy(self, manager: KVCacheManager) -> LlmRequest:
        (dummy,) = manager.add_dummy_requests([CUDA_GRAPH_DUMMY_REQUEST_ID], is_gen=True)
        dummy.is_cuda_graph_dummy = True
        return dummy

    def clear(self) -> None:
        """Release all graphs and their memory."""
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()
        self.graph_outputs.clear()
        self.graph_metadata.clear()
        self.padding_dummy_request = None
        self.memory_pool = None


def _host_tensors(attn_metadata: Any) -> list[torch.Tensor]:
    """What the metadata keeps on the host also where a GPU is."""
    tensors = getattr(attn_metadata, "tensors", None)
    found = [
        attn_metadata.seq_lens,
        getattr(tensors, "host_seq_lens", None),
        getattr(tensors, "host_kv_lens", None),
    ]
    return [tensor for tensor in found if tensor is not None]
