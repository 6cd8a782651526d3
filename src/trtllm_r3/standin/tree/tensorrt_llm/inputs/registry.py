"""Processors that turn a text prompt into token ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sampling_params import SamplingParams
from .data import TextPrompt

if TYPE_CHECKING:
    from ..llmapi.tokenizer import TokenizerBase


class DefaultInputProcessor:
    """Tokenizes text; knows no other modality."""

    def __init__(self, model_path: Path | None, tokenizer: TokenizerBase | None) -> None:
        self.model_path = model_path
        self.tokenizer = tokenizer

    def __call__(
        self, inputs: TextPrompt, sampling_params: SamplingParams
    ) -> tuple[list[int], dict[str, Any] | None]:
        """Token ids of `inputs["prompt"]`, cut from the left to `truncate_prompt_tokens`, and no extras.

        ValueError without a tokenizer or for a text of no tokens.
        """
        if self.tokenizer is None:
            raise ValueError(
                "a tokenizer is required for text prompts: pass token ids, or LLM(tokenizer=...)"
            )
        ids = self.tokenizer.encode(inputs["prompt"], add_special_tokens=sampling_params.add_special_tokens)
        if sampling_params.truncate_prompt_tokens is not None:
            ids = ids[-sampling_params.truncate_prompt_tokens :]
        if not ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        return ids, None


def create_input_processor(
    model_path: Path | None, tokenizer: TokenizerBase | None, checkpoint_format: str | None = "HF"
) -> DefaultInputProcessor:
    """The input processor of a checkpoint; all models here take text."""
    del checkpoint_format
    return DefaultInputProcessor(model_path, tokenizer)
