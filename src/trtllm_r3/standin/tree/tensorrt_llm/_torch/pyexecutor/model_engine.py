"""Runs the model on scheduled batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...mapping import Mapping
from ..attention_backend.interface import AttentionMetadata, AttentionRuntimeFeatures
from ..attention_backend.utils import get_attention_backend
from ..device import get_device
from ..distributed import Distributed
from ..modules.fused_moe.moe_load_balancer import MoeLoadBalancerIterContext
from ..utils import with_model_extra_attrs
from .cuda_graph_runner import CUDAGraphRunner, CUDAGraphRunnerConfig, Inputs, KeyType
from .engine_warmup import EngineWarmup
from .model_inputs import collect_rows, fill_metadata, fill_tokens
from .model_loader import ModelLoader
from .resource_manager import KVCacheManager, ResourceManager, ResourceManagerType

if TYPE_CHECKING:
    from .sampler import SampleStateTensors
    from .scheduler import ScheduledRequests

__all__ = ["ModelEngine", "PyTorchModelEngine"]


class ModelEngine(ABC):
    """Runs batches."""

    @abstractmethod
    def get_max_num_sequences(self) -> int:
        """How many sequences may be active at once."""

    @abstractmethod
    def forward(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager,
        new_tensors_device: SampleStateTensors | None = None,
        gather_context_logits: bool = False,
        cache_indirection_buffer: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """The model's outputs for a batch."""

    @abstractmethod
    def warmup(self, resource_manager: ResourceManager) -> None:
        """Run dummies before the first request."""


class PyTorchModelEngine(EngineWarmup, ModelEngine):
    """A model with its input buffers, attention metadata and graphs.

    `llm_args` are the engine's options; `model` replaces what would be loaded from `model_path`. ValueError
    for a `max_seq_len` beyond what the model has positions for.
    """

    def __init__(
        self,
        *,
        model_path: str | None,
        llm_args: Any,
        mapping: Mapping | None = None,
        attn_runtime_features: AttentionRuntimeFeatures | None = None,
        dist: Distributed | None = None,
        spec_config: Any = None,
        is_draft_model: bool = False,
        model: nn.Module | None = None,
    ) -> None:
        self.llm_args = llm_args
        self.mapping = mapping or Mapping()
        self.dist = dist or Distributed.get(self.mapping)
        self.spec_config, self.is_draft_model = spec_config, is_draft_model
        self.attn_runtime_features = attn_runtime_features or AttentionRuntimeFeatures()
        self.batch_size: int = llm_args.max_batch_size
        self.max_num_tokens: int = llm_args.max_num_tokens
        self.max_beam_width = 1
        self.is_warmup = False
        self.iter_counter = 0
        self.kv_cache_manager_key = ResourceManagerType.KV_CACHE_MANAGER
        self.model_loader = ModelLoader(llm_args, self.mapping, self.max_num_tokens, llm_args.max_seq_len)
        self.model: Any = self.model_loader.load(model_path) if model is None else model  # type: ignore[arg-type]
        self.moe_load_balancer = self.model_loader.moe_load_balancer
        self.max_seq_len = self._init_max_seq_len(llm_args.max_seq_len)
        self.attn_backend = get_attention_backend(llm_args.attn_backend)
        self.attn_metadata: AttentionMetadata | None = None
        with torch.inference_mode(False):
            self.input_ids_cuda = torch.zeros(self.max_num_tokens, dtype=torch.int32, device=get_device())
            self.position_ids_cuda = torch.zeros(
                1, self.max_num_tokens, dtype=torch.int32, device=get_device()
            )
        self._init_graphs()

    def _init_max_seq_len(self, wanted: int | None) -> int:
        positions: int = self.model.config.max_position_embeddings
        if wanted is not None and wanted > positions:
            raise ValueError(f"max_seq_len={wanted} is more than the model's {positions} positions")
        return positions if wanted is None else wanted

    def _init_graphs(self) -> None:
        config = self.llm_args.cuda_graph_config
        largest = min(self.batch_size, self.max_num_tokens)
        sizes = [] if config is None else [size for size in config.batch_sizes if size <= largest]
        if config is not None and config.enable_padding and max(config.batch_sizes) > largest not in sizes:
            sizes.append(largest)
        self._cuda_graph_batch_sizes = sorted(sizes)
        self._max_cuda_graph_batch_size = max(sizes, default=0)
        padding = config is not None and config.enable_padding
        self.cuda_graph_runner = CUDAGraphRunner(
            CUDAGraphRunnerConfig(tuple(sizes), padding, self.batch_size)
        )

    @property
    def model_extra_attrs(self) -> dict[str, Any]:
        """What layers look up while the model runs."""
        attrs: dict[str, Any] = self.model.model_config.extra_attrs
        return attrs

    def get_max_num_sequences(self) -> int:
        """One micro batch for each pipeline stage."""
        return self.batch_size * self.mapping.pp_size

    @torch.inference_mode()
    @with_model_extra_attrs(lambda self: self.model_extra_attrs)
    def forward(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager,
        new_tensors_device: SampleStateTensors | None = None,
        gather_context_logits: bool = False,
        cache_indirection_buffer: torch.Tensor | None = None,
        spec_decoding_tensor: Any = None,
        num_accepted_tokens_device: torch.Tensor | None = None,
        req_id_to_old_request: Any = None,
    ) -> dict[str, torch.Tensor]:
        """`{"logits": [rows, vocab]}`, float32: contexts in order, then generations.

        One row for each request, or with `gather_context_logits` for each token. `new_tensors_device` are the
        tokens of the step before, where the host has not read them yet.
        """
        manager: KVCacheManager = resource_manager.get_resource_manager(self.kv_cache_manager_key)
        attn_metadata = self._set_up_attn_metadata(manager)
        with self.cuda_graph_runner.pad_batch(scheduled_requests, resource_manager) as padded:
            graph_metadata, key = self.cuda_graph_runner.maybe_get_cuda_graph(padded, attn_metadata)
            inputs = self._prepare_inputs(padded, graph_metadata or attn_metadata, new_tensors_device)
            live = not self.is_warmup  # dummies say nothing about the load of the experts
            with MoeLoadBalancerIterContext(self.moe_load_balancer, live, live):
                outputs = self._run(key, inputs, gather_context_logits)
        self.iter_counter += 1
        return outputs

    def _set_up_attn_metadata(self, kv_cache_manager: KVCacheManager) -> AttentionMetadata:
        """The metadata of eager steps; graphs have their own."""
        if self.attn_metadata is None or self.attn_metadata.kv_cache_manager is not kv_cache_manager:
            self.attn_metadata = self.attn_backend.Metadata(
                max_num_requests=self.batch_size,
                max_num_tokens=self.max_num_tokens,
                max_num_sequences=self.get_max_num_sequences(),
                kv_cache_manager=kv_cache_manager,
                mapping=self.mapping,
                runtime_features=self.attn_runtime_features,
            )
        return self.attn_metadata

    def _prepare_inputs(
        self, batch: ScheduledRequests, attn_metadata: Any, new_tensors_device: SampleStateTensors | None
    ) -> Inputs:
        """Arguments of the model's forward. AssertionError for more than `max_num_tokens` rows."""
        rows = collect_rows(batch, overlapped=new_tensors_device is not None)
        total = len(rows.input_ids)
        assert total <= self.max_num_tokens, (
            f"{total} tokens in a step, max_num_tokens is {self.max_num_tokens}"
        )
        fill_metadata(attn_metadata, rows)
        if self.mapping.enable_attention_dp:
            attn_metadata.all_rank_num_tokens = self.dist.tp_allgather(total)
        ids, positions = fill_tokens(rows, self.input_ids_cuda, self.position_ids_cuda, new_tensors_device)
        return {
            "attn_metadata": attn_metadata,
            "input_ids": ids,
            "position_ids": positions,
            "inputs_embeds": None,
        }

    def _run(
        self, key: KeyType | None, inputs: Inputs, gather_context_logits: bool
    ) -> dict[str, torch.Tensor]:
        """Eagerly, or by the graph, which is recorded first if need be."""
        if key is None:
            return self._forward_step(inputs, gather_context_logits)
        if self.cuda_graph_runner.needs_capture(key):
            self.cuda_graph_runner.capture(key, lambda inputs: self._forward_step(inputs, False), inputs)
        outputs: dict[str, torch.Tensor] = self.cuda_graph_runner.replay(key, inputs)
        return outputs

    def _forward_step(self, inputs: Inputs, gather_context_logits: bool) -> dict[str, torch.Tensor]:
        return {"logits": self.model_forward(**inputs, return_context_logits=gather_context_logits)}

    def model_forward(self, **kwargs: Any) -> torch.Tensor:
        """The model itself."""
        logits: torch.Tensor = self.model.forward(**kwargs)
        return logits

    def _release_cuda_graphs(self) -> None:
        self.cuda_graph_runner.clear()
