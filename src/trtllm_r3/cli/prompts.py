"""Reads prompts: one JSON object a line. A bad line is a value, not an error: the others still run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One prompt. `line` counts from 1; `digest` changes with the line's content."""

    line: int
    digest: str
    inputs: str | list[int]
    id: Any
    sampling: Mapping[str, Any]
    meta: Any

    @property
    def text(self) -> str | None:
        """The prompt, if it is given as text."""
        return self.inputs if isinstance(self.inputs, str) else None


@dataclass(frozen=True)
class BadLine:
    """A line that cannot run, and why."""

    line: int
    error: str
    id: Any = None


def _integer(low: int) -> Callable[[Any], bool]:
    return lambda v: type(v) is int and v >= low


def _integers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_integer(0), value))


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda v: type(v) in (int, float) and low <= v <= high


def _strings(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) and text for text in texts)


def _boolean(value: Any) -> bool:
    return isinstance(value, bool)


# What a line may say about its sampling: test, and what the test expects.
_SAMPLING: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_tokens": (_integer(1), "a whole number, 1 or more"),
    "min_tokens": (_integer(0), "a whole number, 0 or more"),
    "n": (_integer(1), "a whole number, 1 or more"),
    "seed": (_integer(0), "a whole number, 0 or more"),
    "top_k": (_integer(0), "a whole number, 0 or more"),
    "temperature": (_number(0, float("inf")), "a number, 0 or more"),
    "top_p": (_number(0, 1), "a number from 0 to 1"),
    "stop": (_strings, "a string or a list of strings, none of them empty"),
    "stop_token_ids": (_integers, "a list of token ids"),
    "end_id": (_integer(-1), "a token id, or -1 for none"),
    "ignore_eos": (_boolean, "true or false"),
    "include_stop_str_in_output": (_boolean, "true or false"),
}
_FIELDS = ("prompt", "prompt_token_ids", "id", "meta", *_SAMPLING)


def read_prompts(path: Path, vocab_size: int | None = None) -> Iterator[Prompt | BadLine]:
    """Every line of the file that is not blank, in order. Raises OSError."""
    ids: dict[str, int] = {}
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                prompt = _parse(line, raw, vocab_size)
                _claim(ids, prompt)
                yield prompt
            except (ValueError, RecursionError) as exc:
                yield BadLine(line, str(exc) or type(exc).__name__)


def count_prompts(path: Path) -> int:
    """Lines that are not blank."""
    with path.open("rb") as file:
        return sum(1 for raw in file if raw.strip())


def _claim(ids: dict[str, int], prompt: Prompt) -> None:
    if prompt.id is not None:
        key = json.dumps(prompt.id)
        if key in ids:
            raise ValueError(f"id {key} is taken by line {ids[key]}")
        ids[key] = prompt.line


def _parse(line: int, raw: bytes, vocab_size: int | None) -> Prompt:
    record = _json_object(raw)
    unknown = [name for name in record if name not in _FIELDS]
    if unknown:
        raise ValueError(
            f"unknown field {unknown[0]!r}; known are {', '.join(_FIELDS)} (fields of your own go into meta)"
        )
    if type(record.get("id")) not in (type(None), str, int):
        raise ValueError("id must be a string or a whole number")
    return Prompt(
        line=line,
        digest=hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16],
        inputs=_inputs(record, vocab_size),
        id=record.get("id"),
        sampling=_sampling(record),
        meta=record.get("meta"),
    )


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except json.JSONDecodeError as exc:
        raise ValueError(f"not JSON: {exc.msg} at column {exc.colno}") from None
    except UnicodeDecodeError as exc:
        raise ValueError(f"not UTF-8: byte {exc.start} {exc.reason}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    return record


def _inputs(record: Mapping[str, Any], vocab_size: int | None) -> str | list[int]:
    text, tokens = record.get("prompt"), record.get("prompt_token_ids")
    if (text is None) == (tokens is None):
        found = "neither" if text is None else "both"
        raise ValueError(f"expected one of prompt and prompt_token_ids, found {found}")
    if tokens is None:
        if not isinstance(text, str) or not text:
            raise ValueError(f"prompt must be a string that is not empty, found {_short(text)}")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("prompt has half of a surrogate pair, which is no character")
        return text
    if not _integers(tokens):
        raise ValueError(f"prompt_token_ids must be a list of token ids, not empty, found {_short(tokens)}")
    if vocab_size is not None and max(tokens) >= vocab_size:
        raise ValueError(f"token id {max(tokens)} is outside the model's vocabulary of {vocab_size}")
    return list(tokens)


def _sampling(record: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: record[name] for name in _SAMPLING if record.get(name) is not None}
    for name, value in given.items():
        good, expected = _SAMPLING[name]
        if not good(value):
            raise ValueError(f"{name} must be {expected}, found {_short(value)}")
    return given


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
