"""A bad line of the prompts is named with its number, and the others run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtllm_r3.cli.prompts import BadLine, Prompt, count_prompts, read_prompts


def read(tmp_path: Path, *lines: bytes | str | dict) -> list[Prompt | BadLine]:
    raw = [
        x if isinstance(x, bytes) else (x if isinstance(x, str) else json.dumps(x)).encode() for x in lines
    ]
    (tmp_path / "p.jsonl").write_bytes(b"\n".join(raw) + b"\n")
    return list(read_prompts(tmp_path / "p.jsonl", vocab_size=50))


def test_text_and_tokens_with_their_options(tmp_path):
    text, tokens = read(
        tmp_path,
        {
            "prompt": "one",
            "id": "a",
            "max_tokens": 3,
            "temperature": 0,
            "stop": ["x"],
            "meta": {"answer": 42},
        },
        {"prompt_token_ids": [0, 49], "id": 7, "seed": None},
    )
    assert (text.line, text.inputs, text.id, text.meta) == (1, "one", "a", {"answer": 42})
    assert text.sampling == {"max_tokens": 3, "temperature": 0, "stop": ["x"]}
    assert (tokens.line, tokens.inputs, tokens.id, tokens.sampling) == (2, [0, 49], 7, {})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "cut off', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ("[1, 2]", "expected a JSON object, found list"),
        ("{}", "found neither"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "found both"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": 5}, "must be a string"),
        (r'{"prompt": "half \ud83d"}', "half of a surrogate pair"),
        ({"prompt_token_ids": []}, "not empty"),
        ({"prompt_token_ids": [1, "2"]}, "list of token ids"),
        ({"prompt_token_ids": [1, True]}, "list of token ids"),
        ({"prompt_token_ids": [-1]}, "list of token ids"),
        ({"prompt_token_ids": [50]}, "outside the model's vocabulary of 50"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be a whole number, 1 or more, found 0"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "a", "top_p": 1.5}, "top_p must be a number from 0 to 1"),
        ({"prompt": "a", "stop": [""]}, "none of them empty"),
        ({"prompt": "a", "max_token": 3}, "unknown field 'max_token'"),
        ({"prompt": "a", "id": [1]}, "id must be"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_says_what_is_wrong(tmp_path, line, says):
    before, bad, after = read(tmp_path, {"prompt": "a"}, line, {"prompt": "b"})
    assert isinstance(bad, BadLine)
    assert bad.line == 2
    assert says in bad.error
    assert isinstance(before, Prompt)
    assert isinstance(after, Prompt)
    assert after.line == 3


def test_an_id_belongs_to_one_line(tmp_path):
    first, second, other = read(
        tmp_path, {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}, {"prompt": "b", "id": 1}
    )
    assert isinstance(first, Prompt)
    assert second == BadLine(2, 'id "x" is taken by line 1')
    assert isinstance(other, Prompt)


def test_blank_lines_count_as_lines_only(tmp_path):
    prompts = read(tmp_path, "", {"prompt": "a"}, "   ", {"prompt": "b"}, "")
    assert [p.line for p in prompts] == [2, 4]
    assert count_prompts(tmp_path / "p.jsonl") == 2


def test_the_digest_is_of_the_content_and_not_of_the_spelling(tmp_path):
    one, same, other = read(
        tmp_path, '{"prompt": "a", "seed": 1}', '{"seed":1,  "prompt":"a"}', {"prompt": "a", "seed": 2}
    )
    assert one.digest == same.digest != other.digest
