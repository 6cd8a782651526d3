"""The forms a prompt may take."""

from __future__ import annotations

from typing import Any, Optional, TypedDict, Union, cast


class TextPrompt(TypedDict, total=False):
    """A prompt as text (`prompt` is required)."""

    prompt: str
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    query: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids (`prompt_token_ids` is required)."""

    prompt_token_ids: list[int]
    prompt: Optional[str]
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    query_token_ids: list[int]


PromptInputs = Union[str, list[int], TextPrompt, TokensPrompt]

_UNSUPPORTED = (
    "multi_modal_data",
    "multi_modal_embeddings",
    "mm_processor_kwargs",
    "query",
    "query_token_ids",
)


def prompt_inputs(inputs: PromptInputs) -> TextPrompt | TokensPrompt:
    """One prompt as a dictionary.

    TypeError if it is neither a string, a list of token ids, nor a dictionary with one of both;
    ValueError for an empty one and for multi-modal or query inputs.
    """
    if isinstance(inputs, str):
        return TextPrompt(prompt=inputs)
    if isinstance(inputs, list):
        return TokensPrompt(prompt_token_ids=_token_ids(inputs))
    if not isinstance(inputs, dict):
        raise TypeError(f"a prompt must be str, list[int], TextPrompt or TokensPrompt, got {type(inputs)}")
    for name in _UNSUPPORTED:
        if inputs.get(name) is not None:
            raise ValueError(f"the prompt's {name} is not supported: text or token ids only")
    if inputs.get("prompt_token_ids") is not None:
        _token_ids(cast(TokensPrompt, inputs)["prompt_token_ids"])
    elif not isinstance(inputs.get("prompt"), str):
        raise TypeError("a prompt dictionary needs `prompt` (str) or `prompt_token_ids` (list[int])")
    return inputs


def _token_ids(ids: list[int]) -> list[int]:
    if not ids:
        raise ValueError("the prompt is empty: it needs at least one token")
    if not all(isinstance(token, int) for token in ids):
        raise TypeError("prompt_token_ids must hold ints only")
    return ids
