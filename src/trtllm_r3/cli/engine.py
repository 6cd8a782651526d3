"""The engine that the commands run on: stock TensorRT-LLM where it is installed, else the stand-in.

The one file of this folder that knows either by name.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from .. import enable, standin


@dataclass(frozen=True)
class Engine:
    """Which engine runs, and its version."""

    name: str
    version: str

    @property
    def is_stock(self) -> bool:
        """Whether it is the real one."""
        return self.name == "TensorRT-LLM"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to build it. None: the engine's own default, but small sizes on the stand-in.

    `extra` are further arguments of LLM.
    """

    model: str
    tokenizer: str | None = None
    chunked_prefill: bool | None = None
    overlap: bool | None = None
    cuda_graphs: bool | None = None
    block_reuse: bool = True
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_tokens: int | None = None
    moe_backend: str | None = None
    moe_max_num_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


# The engine's defaults are those of a large GPU, and warm-up would record as many graphs.
_ON_A_CPU = {"max_batch_size": 16, "max_num_tokens": 1024, "chunked_prefill": True, "cuda_graphs": True}


def choose() -> Engine:
    """Decide once, before anything imports the engine. Raises StandInUnavailable, ImportError."""
    if standin.installed() is None and find_spec("tensorrt_llm") is None:
        standin.install()
    era = standin.installed()  # TRTLLM_R3_STANDIN may have chosen it while we looked
    if era is not None:
        return Engine("the stand-in engine", f"(era {era})")
    try:
        return Engine("TensorRT-LLM", version("tensorrt-llm"))
    except PackageNotFoundError:
        return Engine("TensorRT-LLM", "of unknown version")


def build(options: EngineOptions, *, routes: bool = True) -> Any:
    """An LLM, returning routes or plain. Raises what its construction raises."""
    if routes:
        enable()
    llm_class = importlib.import_module("tensorrt_llm").LLM
    arguments = _arguments(_completed(options))
    if routes:
        arguments["enable_return_routed_experts"] = True
    return llm_class(**arguments)


def _completed(options: EngineOptions) -> EngineOptions:
    if standin.installed() is None:
        return options
    open_ones = {f.name for f in fields(options) if getattr(options, f.name) is None}
    small: dict[str, Any] = {name: value for name, value in _ON_A_CPU.items() if name in open_ones}
    return replace(options, **small)


def _arguments(options: EngineOptions) -> dict[str, Any]:
    api = importlib.import_module("tensorrt_llm.llmapi")
    given = {
        "model": options.model,
        "tokenizer": options.tokenizer,
        "enable_chunked_prefill": options.chunked_prefill,
        "disable_overlap_scheduler": None if options.overlap is None else not options.overlap,
        "max_batch_size": options.max_batch_size,
        "max_num_tokens": options.max_num_tokens,
        "max_seq_len": options.max_seq_len,
    }
    arguments: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    cache = {
        "enable_block_reuse": options.block_reuse,
        "enable_partial_reuse": False,  # whose rows a partly matching block has can't always be proven
        "max_tokens": options.kv_tokens,
    }
    arguments["kv_cache_config"] = api.KvCacheConfig(**cache)
    moe = {"backend": options.moe_backend, "max_num_tokens": options.moe_max_num_tokens}
    if any(moe.values()):
        arguments["moe_config"] = api.MoeConfig(**{k: v for k, v in moe.items() if v is not None})
    if options.cuda_graphs is not None:
        arguments["cuda_graph_config"] = _graphs(api, options) if options.cuda_graphs else None
    return {**arguments, **options.extra}


def _graphs(api: Any, options: EngineOptions) -> Any:
    return api.CudaGraphConfig(enable_padding=True, max_batch_size=min(options.max_batch_size or 128, 128))


def sampling_params(**options: Any) -> Any:
    """The engine's SamplingParams. Raises ValueError for what makes no sense."""
    return importlib.import_module("tensorrt_llm").SamplingParams(**options)


def is_fault_of_one_request(error: BaseException) -> bool:
    """Whether the engine goes on after this error of a request in flight."""
    return type(error).__name__ == "RequestError"


def in_this_process() -> None:
    """Run the engine of LLMs built from now on in this process and not in a worker of its own."""
    os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] = "1"
