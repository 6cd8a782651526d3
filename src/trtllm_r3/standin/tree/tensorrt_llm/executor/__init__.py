"""Executors: from a request to its result, in this process or through a worker process."""

from .executor import GenerationExecutor
from .postproc_worker import PostprocParams, PostprocWorkerConfig
from .proxy import GenerationExecutorProxy
from .request import CancellingRequest, GenerationRequest
from .result import (
    CompletionOutput,
    DetokenizedGenerationResultBase,
    GenerationResult,
    GenerationResultBase,
    IterationResult,
    Logprob,
)
from .utils import RequestError
from .worker import GenerationExecutorWorker

__all__ = [
    "CancellingRequest",
    "CompletionOutput",
    "DetokenizedGenerationResultBase",
    "GenerationExecutor",
    "GenerationExecutorProxy",
    "GenerationExecutorWorker",
    "GenerationRequest",
    "GenerationResult",
    "GenerationResultBase",
    "IterationResult",
    "Logprob",
    "PostprocParams",
    "PostprocWorkerConfig",
    "RequestError",
]
