"""A tokenizer for the tiny checkpoints: one visible character a token, so that any text can be written by hand."""

from __future__ import annotations

from typing import Any


def character_tokenizer(vocab: int = 96, eos: int = 2) -> Any:
    """Token i is chr(33 + i); transformers' fast tokenizer, without special tokens but the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(33 + i): i for i in range(vocab)}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token=chr(33)))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    end = chr(33 + eos)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False
    )


def text_of(tokens: list[int]) -> str:
    """The text of these tokens."""
    return "".join(chr(33 + t) for t in tokens)
