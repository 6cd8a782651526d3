"""The output of a request. Imported from `llm`."""

from __future__ import annotations

from ..executor import DetokenizedGenerationResultBase, GenerationResult
from .tokenizer import TokenizerBase


class RequestOutput(DetokenizedGenerationResultBase, GenerationResult):
    """The outputs of one request: `prompt`, `prompt_token_ids`, `outputs`, `finished`, `context_logits`.

    Made by the LLM from a `GenerationResult`, never by users.
    """

    _prompt: str | None

    def __init__(self) -> None:
        raise RuntimeError(f"{type(self).__name__} is made by the LLM only")

    @classmethod
    def _from_generation_result(
        cls,
        generation_result: GenerationResult,
        prompt: str | None = None,
        tokenizer: TokenizerBase | None = None,
    ) -> RequestOutput:
        output = cls.__new__(cls)
        output.__dict__.update(generation_result.__dict__)
        output.tokenizer = tokenizer
        output._streaming = generation_result._streaming
        output._prompt = prompt
        return output

    @property
    def prompt(self) -> str | None:
        """The prompt, if it was given as text."""
        return self._prompt

    def _repr_fields(self) -> list[str]:
        return ["request_id", "prompt", "prompt_token_ids", "outputs", "finished"]
