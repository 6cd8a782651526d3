"""Returns the experts that a stock TensorRT-LLM engine routed each token to.

    import trtllm_r3
    trtllm_r3.enable()
    llm = LLM(model, enable_return_routed_experts=True)
    out = llm.generate(prompt, SamplingParams(return_routed_experts=True))
    out.outputs[0].routed_experts       # int16 [S-1, num_moe_layers, top_k]

Source of the method: arXiv 2510.11370; of the interface: RFC TensorRT-LLM#17778.
Importing this package imports neither torch nor tensorrt_llm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors
from .config import Config

if TYPE_CHECKING:
    from .flow.routes import Routes

__version__ = "0.1.0"
__all__ = ["Config", "Routes", "disable", "enable", "errors", "reset", "routes_of", "status"]


def enable(**options: Any) -> None:
    """Put the hooks in place, now or when the engine's modules are imported. See `Config` for options.

    Idempotent; calling it again with other options changes them for engines built from then on.
    Raises ConfigError.
    """
    from .trtllm.runtime import runtime

    runtime().enable(Config.from_env(options))


def disable() -> None:
    """Take every hook out again: each patched attribute is the very object it was. Idempotent.

    Engines that were built while enabled keep running; they stop capturing.
    """
    from .trtllm.runtime import runtime

    runtime().disable()


def status() -> dict[str, Any]:
    """What is patched, which engines capture, what was counted, what went wrong. Plain values.

    Counters of worker processes are those of their last response, with its age in seconds.
    """
    from .trtllm.runtime import runtime

    return runtime().status()


def reset() -> int:
    """Start a new weight version: rows captured from now on carry its number. Returns the number.

    It travels with every later request to the workers, where it takes effect before the request does. It
    does not touch the engine's KV cache: as long as that serves what older weights computed, a hit has the
    rows, and the version, of those weights. `reset_prefix_cache` of the engine ends that, and is noticed.
    """
    from .trtllm.runtime import runtime

    return runtime().reset()


def routes_of(completion: Any) -> Routes:
    """The routes of a `CompletionOutput` with layer ids, gaps and versions.

    Never None: if there are no routes, `Routes.ids` is None and `Routes.why_none` says why.
    """
    from .trtllm.responses import routes_of as of

    return of(completion)


def __getattr__(name: str) -> Any:
    if name == "Routes":
        from .flow.routes import Routes

        return Routes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
