"""A small real inference engine under TensorRT-LLM's own module names (PyTorch backend, era 1.2)."""

from .disaggregated_params import DisaggregatedParams
from .llmapi import LLM, LlmArgs
from .logger import logger
from .mapping import Mapping
from .sampling_params import SamplingParams
from .version import __version__

__all__ = ["LLM", "DisaggregatedParams", "LlmArgs", "Mapping", "SamplingParams", "__version__", "logger"]
