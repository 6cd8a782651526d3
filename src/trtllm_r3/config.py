"""Options: one frozen object, each field with a twin among the environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .errors import ConfigError, explain

_TRUE, _FALSE = frozenset({"1", "true", "on", "yes"}), frozenset({"", "0", "false", "off", "no"})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `enable()` takes. Every field can be set by the environment variable named beside it.

    engine: return routes from every LLM of this process, also where the caller cannot pass
        `enable_return_routed_experts=True`. `TRTLLM_R3=1` implies it, `TRTLLM_R3_ENGINE=0` undoes that.
    default_return: treat each request as if it had `return_routed_experts=True`.
    capture: "step" keeps the ids of all layers and gathers them once a forward; "layer" writes each
        layer by itself (slower; the reference).
    fused: what to do with a MoE backend that routes inside its kernel: "refuse" the engine, or
        "separate" routing from the kernel where the engine has a switch for it.
    on_gap: a row that could not be captured is -1 ("sentinel"), or reading the result raises
        RoutesMissing ("error").
    native: on an engine that returns routes by itself, whose own recorder stays in charge, "override"
        puts the hooks in place and warns when the LLM is built, "defer" patches nothing.
    shared_cache_tokens: for how many tokens of the engine's KV cache rows are kept on the host, for requests
        that hit them: -1 all of them, 0 none (hits are then missing).
    staging_slots: steps whose rows may be on their way to the host at once (2 or more).
    """

    engine: bool = field(default=False, metadata={"env": "TRTLLM_R3_ENGINE"})
    default_return: bool = field(default=False, metadata={"env": "TRTLLM_R3_DEFAULT"})
    capture: Literal["step", "layer"] = field(default="step", metadata={"env": "TRTLLM_R3_CAPTURE"})
    fused: Literal["refuse", "separate"] = field(default="refuse", metadata={"env": "TRTLLM_R3_FUSED"})
    on_gap: Literal["sentinel", "error"] = field(default="sentinel", metadata={"env": "TRTLLM_R3_ON_GAP"})
    native: Literal["override", "defer"] = field(default="override", metadata={"env": "TRTLLM_R3_NATIVE"})
    shared_cache_tokens: int = field(default=-1, metadata={"env": "TRTLLM_R3_SHARED_CACHE_TOKENS"})
    staging_slots: int = field(default=4, metadata={"env": "TRTLLM_R3_STAGING_SLOTS"})

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Config).items():
            _check(name, hint, getattr(self, name))
        if self.staging_slots < 2:
            raise ConfigError(
                explain(
                    what="staging_slots",
                    expected="2 or more",
                    found=str(self.staging_slots),
                    remedy="One slot would make each step wait for the copy of the step before.",
                )
            )

    @classmethod
    def from_env(cls, options: Mapping[str, Any] | None = None) -> Config:
        """Options first, then the environment, then the defaults. Raises ConfigError."""
        given = dict(options or {})
        known = {f.name: f for f in fields(cls)}
        for name in given:
            if name not in known:
                raise ConfigError(
                    explain(
                        what="enable()", expected=f"one of {', '.join(known)}", found=repr(name), remedy=""
                    )
                )
        hints = get_type_hints(cls)
        _refuse_unknown({f.metadata["env"] for f in known.values()})
        for name, f in known.items():
            text = os.environ.get(f.metadata["env"])
            if name not in given and text is not None:
                given[name] = _parse(f.metadata["env"], hints[name], text)
        if "engine" not in given and armed():
            given["engine"] = True
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a worker process."""
        return asdict(self)


def armed() -> bool:
    """Whether `TRTLLM_R3` switches the package on for this process."""
    return _parse("TRTLLM_R3", bool, os.environ.get("TRTLLM_R3", "")) is True


def _refuse_unknown(known: set[str]) -> None:
    for name in os.environ:
        if name.startswith("TRTLLM_R3_") and name not in known | {"TRTLLM_R3_STANDIN"}:
            raise ConfigError(
                explain(
                    what="environment",
                    expected=f"one of {', '.join(sorted(known))}",
                    found=name,
                    remedy="Correct its name or unset it.",
                )
            )


def _parse(name: str, hint: Any, text: str) -> Any:
    if hint is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(
            explain(what=name, expected="1 or 0", found=repr(text), remedy="Set it or unset it.")
        )
    if hint is int:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(explain(what=name, expected="a number", found=repr(text), remedy="")) from None
    return text


def _check(name: str, hint: Any, value: Any) -> None:
    if get_origin(hint) is Literal:
        good, expected = value in get_args(hint), " or ".join(repr(a) for a in get_args(hint))
    else:
        good, expected = type(value) is hint, hint.__name__
    if not good:
        raise ConfigError(
            explain(
                what=name, expected=expected, found=repr(value), remedy="See docs/options.md for each option."
            )
        )
