"""Text of generated tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..llmapi.tokenizer import TokenizerBase


def full_text(tokenizer: TokenizerBase, params: SamplingParams, token_ids: list[int]) -> str:
    """The text of all tokens."""
    return tokenizer.decode(
        token_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def extend_text(
    tokenizer: TokenizerBase,
    params: SamplingParams,
    token_ids: list[int],
    text: str,
    states: dict[str, Any] | None,
    ended: bool,
) -> tuple[str, dict[str, Any]]:
    """The text of all tokens, given text and state after some of them; unfinished characters wait."""
    consumed = states["consumed"] if states else 0
    text, states = tokenizer.decode_incrementally(
        token_ids[consumed:],
        prev_text=text,
        states=states,
        flush=ended,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        stream_interval=params._stream_interval or 1,
    )
    return text, {**states, "consumed": len(token_ids)}


def find_stop_string(params: SamplingParams, text: str) -> tuple[str, int] | None:
    """The first of the stop strings that the text holds, and how much text to keep; None if there is none."""
    for reason, _ in params._get_stop_reasons_and_words():
        if isinstance(reason, str) and reason in text:
            keep = text.index(reason)
            return reason, keep + len(reason) if params.include_stop_str_in_output else keep
    return None
