"""The engine option: how `enable_return_routed_experts` gets into LLM and from there to the worker."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from ..config import Config
from ..errors import ConfigError, R3Error, RequestRefused, UnsupportedError, explain
from .requests import Ask, ask_of, set_ask
from .runtime import runtime

ARGS_ATTRIBUTE = "_trtllm_r3"  # on LlmArgs, which travel to the workers by pickle
LLM_ATTRIBUTE = "_trtllm_r3_config"
_OPTION = "enable_return_routed_experts"
_config: contextvars.ContextVar[Config | None] = contextvars.ContextVar("trtllm_r3_llm", default=None)

# Engine options under which rows can't be told apart or lie on other ranks: (name, value that is fine, why).
_REFUSED = (
    ("pipeline_parallel_size", 1, "each rank has only its own layers"),
    ("context_parallel_size", 1, "each rank has only its own tokens"),
    ("max_beam_width", 1, "beams exchange their histories"),
    ("speculative_config", None, "rows of rejected drafts cannot be told apart"),
    ("cache_transceiver_config", None, "the prompt's rows are on another server"),
    ("enable_attention_dp", False, "rows lie on several ranks, which is not proven yet"),
    ("kv_connector_config", None, "positions that a connector loads were computed elsewhere"),
    ("torch_compile_config", None, "layers that are traced are not heard yet"),
    ("orchestrator_type", None, "workers under that orchestrator are not reached yet"),
    ("num_postprocess_workers", 0, "post-processing workers are not reached yet"),
)


def config_of(llm_args: Any) -> Config | None:
    """The options under which this engine returns routes, or None."""
    found = getattr(llm_args, "__dict__", {}).get(ARGS_ATTRIBUTE)
    return None if found is None else Config(**found)


def llm_init(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> None:
    """Around `BaseLLM.__init__(model, ..., **kwargs)`, which checks kwargs and starts the workers."""
    chosen = kwargs.pop(_OPTION, None)
    if chosen is not None and not isinstance(chosen, bool):
        raise ConfigError(explain(what=_OPTION, expected="True or False", found=repr(chosen), remedy=""))
    config = runtime().config if chosen or (chosen is None and runtime().config.engine) else None
    token = _config.set(config)
    try:
        setattr(instance, LLM_ATTRIBUTE, config)
        wrapped(*args, **kwargs)
    except Exception as exc:
        ours = _cause(exc)
        if ours is None or ours is exc:
            raise
        raise type(ours)(*ours.args) from exc  # the worker's refusal, not that a worker returned an error
    finally:
        _config.reset(token)


def _cause(error: BaseException | None) -> R3Error | None:
    while error is not None and not isinstance(error, R3Error):
        error = error.__cause__
    return error


def args_from_kwargs(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Around `BaseLlmArgs.from_kwargs(**kwargs)`: refuse early, then write the options onto the result."""
    llm_args = wrapped(*args, **kwargs)
    config = _config.get()
    if config is not None:
        _check_supported(llm_args)
        # The model forbids extra fields; __dict__ is what pickle, copy and model_copy carry along.
        object.__setattr__(llm_args, ARGS_ATTRIBUTE, config.to_dict())
    return llm_args


def _check_supported(llm_args: Any) -> None:
    for name, fine, why in _REFUSED:
        value = getattr(llm_args, name, fine)
        several_ranks = name != "enable_attention_dp" or llm_args.tensor_parallel_size > 1
        if value not in (fine, None) and several_ranks:
            raise UnsupportedError(
                explain(
                    what=f"{name} with {_OPTION}",
                    expected=repr(fine),
                    found=repr(value) if isinstance(value, int) else type(value).__name__,
                    remedy=f"Routes would be wrong, since {why}. Build the LLM without one of the two.",
                )
            )
    if getattr(llm_args, "backend", None) not in ("pytorch", None):
        raise UnsupportedError(
            explain(
                what="backend",
                expected="'pytorch'",
                found=repr(llm_args.backend),
                remedy="Choose that backend.",
            )
        )


def prepare_sampling_params(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Around `_prepare_sampling_params(sampling_params)`: apply the default, refuse what cannot be."""
    params = wrapped(*args, **kwargs)
    config, ask = getattr(instance, LLM_ATTRIBUTE, None), ask_of(params)
    if not ask.asked and config is not None and config.default_return:
        ask = Ask(asked=True)
        params = set_ask(params, ask)
    if not ask.asked:
        return params
    if config is None:
        raise RequestRefused(
            explain(
                what="return_routed_experts",
                expected="an LLM that returns routed experts",
                found="one built without the option",
                remedy=f"Build it with LLM(..., {_OPTION}=True), or set TRTLLM_R3_ENGINE=1.",
            )
        )
    if params.use_beam_search:
        raise RequestRefused(
            explain(
                what="return_routed_experts",
                expected="no beam search",
                found="use_beam_search=True",
                remedy="Sample.",
            )
        )
    return params


def check_arguments(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Around `_check_arguments(prompt_len, query_len, sampling_params)`: the offset lies in the prompt."""
    prompt_len = kwargs["prompt_len"] if "prompt_len" in kwargs else args[0]
    params = kwargs["sampling_params"] if "sampling_params" in kwargs else args[2]
    ask = ask_of(params)
    if ask.asked and ask.start > prompt_len:
        raise RequestRefused(
            explain(
                what="routed_experts_start",
                expected=f"0 to {prompt_len}, the prompt's length",
                found=str(ask.start),
                remedy="Rows before the offset are those that you have already.",
            )
        )
    return wrapped(*args, **kwargs)
