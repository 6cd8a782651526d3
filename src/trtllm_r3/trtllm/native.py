"""Does this engine return routed experts by itself (TensorRT-LLM#18397, first possible in 1.3.0rc28)?"""

from __future__ import annotations

import importlib.util
import sys
from enum import Enum

_MODULE = "tensorrt_llm._torch.route_capture"


class Native(Enum):
    """PRESENT, ABSENT, or UNKNOWN while the engine has not been imported."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"


def detect() -> Native:
    """By feature, never by version; imports nothing."""
    if "tensorrt_llm._torch" not in sys.modules:
        return Native.UNKNOWN
    return Native.PRESENT if importlib.util.find_spec(_MODULE) is not None else Native.ABSENT
