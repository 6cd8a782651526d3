"""A small Qwen3-MoE checkpoint with its tokenizer, and prompts of real sentences, made on the spot.

All text is that of Python's own help pages, which ship with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

END, VOCAB = "<|end|>", 512
_GROUP = 8  # prompts that share a prefix
_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def build_checkpoint(path: Path | str, seed: int = 0) -> str:
    """Random weights and a trained tokenizer, as `save_pretrained` writes them. Returns the path."""
    tokenizer = build_tokenizer()
    with quiet():
        model = _model(seed, tokenizer.eos_token_id)
        model.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return str(path)


def _model(seed: int, end: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = _transformers().Qwen3MoeConfig(
            **_CONFIG, eos_token_id=end, pad_token_id=end, bos_token_id=None
        )
        model = _transformers().Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[end] *= 1.7  # so that some answers end by themselves
    return model


def build_tokenizer() -> Any:
    """A byte-level BPE of `VOCAB` tokens, trained on the help pages, as transformers wraps it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(help_pages(), trainer)
    return _transformers().PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def help_pages() -> list[str]:
    """Python's help on its own language, page by page."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def sentences() -> list[list[str]]:
    """The sentences of each page that has enough of them."""
    pages = []
    for page in help_pages():
        paragraphs = (re.sub(r"\s+", " ", p).strip() for p in page.split("\n\n"))
        prose = [p for p in paragraphs if re.match(r"[A-Z].*[.:]$", p) and "::=" not in p]
        found = [s for p in prose for s in re.split(r"(?<=[.:]) ", p) if 40 <= len(s) <= 240]
        if len(found) >= 2 * _GROUP:
            pages.append(found)
    return pages


def write_prompts(path: Path, count: int, checkpoint: str, seed: int = 0) -> None:
    """Prompts of 30 to 300 tokens for `trtllm-r3 rollout`, eight at a time with one beginning.

    A third of them end at stop tokens, a third at stop strings, all at the end token or by length.
    """
    tokenizer = _transformers().AutoTokenizer.from_pretrained(checkpoint)
    strings, rng = lone_characters(tokenizer), random.Random(seed)
    tokens = rng.sample(range(256, VOCAB), 16)
    endings: list[dict[str, Any]] = [{}, {"stop_token_ids": tokens}, {"stop": strings}]
    with path.open("w", encoding="utf-8") as file:
        for i, prompt in enumerate(_prompts(rng, count)):
            sampling = {"temperature": 1.0, "max_tokens": rng.randint(8, 40), **endings[i % 3]}
            file.write(json.dumps({"id": f"demo-{i}", "prompt": prompt, **sampling}) + "\n")


def _prompts(rng: random.Random, count: int) -> Iterator[str]:
    pages = sentences()
    for i in range(count):
        page = pages[(i // _GROUP) % len(pages)]
        shared = page[: 1 + (i // _GROUP) % 5]
        yield " ".join([*shared, page[len(shared) + rng.randrange(len(page) - len(shared))]])


def lone_characters(tokenizer: Any) -> list[str]:
    """Characters that are in one token only, so that the engine sees a stop string where the text has it."""
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    printable = map(chr, range(33, 127))
    return [c for c in printable if sum(c in text for text in texts) == 1][:24]


def _transformers() -> Any:
    return importlib.import_module("transformers")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice."""
    logging = _transformers().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
