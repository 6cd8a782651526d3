"""Tokenizers as the LLM API uses them. The transformers package is imported only when one is loaded."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ..logger import logger

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenizerBase:
    """What the LLM API needs of a tokenizer; subclass it to bring an own one."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence."""
        raise AttributeError(f"{type(self).__name__} must define eos_token_id")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token."""
        return None

    def encode(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        """Token ids of a text."""
        raise TypeError(f"{type(self).__name__} must define encode")

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Text of token ids."""
        raise TypeError(f"{type(self).__name__} must define decode")

    def decode_incrementally(
        self,
        token_ids: list[int],
        prev_text: str | None = None,
        states: dict[str, Any] | None = None,
        *,
        flush: bool = False,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
        stream_interval: int = 1,
    ) -> tuple[str, dict[str, Any]]:
        """Text so far after some more tokens, and the state for the next call.

        Tokens whose text may still change (an unfinished character) wait for the next call, unless `flush`.
        """
        del stream_interval
        states = states or {}
        shown: list[int] = states.get("shown", [])
        pending: list[int] = states.get("pending", []) + list(token_ids)
        kwargs = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
        }
        before = self.decode(shown, **kwargs) if shown else ""
        after = self.decode(shown + pending, **kwargs) if pending else before
        if not flush and (len(after) <= len(before) or after.endswith(_REPLACEMENT)):
            return prev_text or "", {"shown": shown, "pending": pending}
        return (prev_text or "") + after[len(before) :], {"shown": pending or shown, "pending": []}


class TransformersTokenizer(TokenizerBase):
    """A tokenizer of the transformers package.

    Travels to the worker as bytes and is rebuilt there on first use, so that a worker that never needs it
    does not import transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._payload: bytes | None = None

    @property
    def tokenizer(self) -> Any:
        """The wrapped object."""
        if self._payload is not None:
            self._tokenizer, self._payload = pickle.loads(self._payload), None
        return self._tokenizer

    def __getstate__(self) -> bytes:
        return self._payload if self._payload is not None else pickle.dumps(self._tokenizer)

    def __setstate__(self, payload: bytes) -> None:
        self._tokenizer, self._payload = None, payload

    def __call__(self, text: str, *args: Any, **kwargs: Any) -> Any:
        """The wrapped tokenizer's own call."""
        return self.tokenizer(text, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokenizer})"

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence."""
        return _optional_int(self.tokenizer.eos_token_id)

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token."""
        return _optional_int(self.tokenizer.pad_token_id)

    @property
    def name_or_path(self) -> str:
        """Where it was loaded from."""
        return str(self.tokenizer.name_or_path)

    def encode(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        """Token ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens, **kwargs))

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Text of token ids."""
        return str(self.tokenizer.decode(token_ids, **kwargs))

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """The prompt of a conversation."""
        return self.tokenizer.apply_chat_template(conversation, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_dir: str | Path, **kwargs: Any) -> TransformersTokenizer:
        """Load from a directory."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(str(pretrained_model_dir), **kwargs))

    def save_pretrained(self, pretrained_model_dir: str | Path, **kwargs: Any) -> None:
        """Save to a directory."""
        self.tokenizer.save_pretrained(str(pretrained_model_dir), **kwargs)


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def tokenizer_factory(obj: Any = None, **kwargs: Any) -> TokenizerBase | None:
    """A tokenizer from a path, from one of transformers, or the object itself if it is a `TokenizerBase`.

    TypeError for anything else; None gives None.
    """
    if obj is None or isinstance(obj, TokenizerBase):
        return obj
    if isinstance(obj, (str, Path)):
        defaults = {"padding_side": "left", "truncation_side": "left", "use_fast": True}
        return TransformersTokenizer.from_pretrained(obj, **(defaults | kwargs))
    if hasattr(obj, "encode") and hasattr(obj, "decode") and hasattr(obj, "eos_token_id"):
        return TransformersTokenizer(obj)
    raise TypeError(f"tokenizer={obj!r} is neither a path nor a tokenizer")


def load_hf_tokenizer(
    model_dir: str | Path, trust_remote_code: bool = True, use_fast: bool = True, **kwargs: Any
) -> TokenizerBase | None:
    """The tokenizer of a checkpoint directory, or None (with a warning) if it has none."""
    if not any((Path(model_dir) / name).exists() for name in _TOKENIZER_FILES):
        logger.warning(f"no tokenizer files in {model_dir}: text prompts need LLM(tokenizer=...)")
        return None
    try:
        return tokenizer_factory(model_dir, trust_remote_code=trust_remote_code, use_fast=use_fast, **kwargs)
    except Exception as error:
        logger.warning(f"failed to load the tokenizer of {model_dir}: {error}")
        return None
