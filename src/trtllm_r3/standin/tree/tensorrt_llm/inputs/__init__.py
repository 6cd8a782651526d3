"""Prompts: what a user may pass, and how it becomes token ids."""

from .data import PromptInputs, TextPrompt, TokensPrompt, prompt_inputs
from .registry import DefaultInputProcessor, create_input_processor
from .utils import get_cache_salt_id

__all__ = [
    "DefaultInputProcessor",
    "PromptInputs",
    "TextPrompt",
    "TokensPrompt",
    "create_input_processor",
    "get_cache_salt_id",
    "prompt_inputs",
]
