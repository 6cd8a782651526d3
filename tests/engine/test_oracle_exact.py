"""Every row equals the oracle's, under each engine feature."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.rollouts import ask, check_oracle, engine, prompts, settings, together

import trtllm_r3

Oracle = tuple[str, dict[str, Any]]
CELLS = list(itertools.product([True, False], [True, False], [True, False], [1, 3]))
# Each pair of values occurs; the other cells run with the slow tests.
PAIRWISE = {(True, True, True, 1), (True, False, False, 3), (False, True, False, 1), (False, False, True, 3)}


def cell_id(cell: tuple[bool, bool, bool, int]) -> str:
    return "-".join(
        f"{name}={int(v)}"
        for name, v in zip(("overlap", "chunked", "graphs", "moe_chunks"), cell, strict=True)
    )


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=cell_id(c), marks=[] if c in PAIRWISE else pytest.mark.slow) for c in CELLS]
)
@pytest.mark.parametrize("capture", ["step", "layer"])
def test_every_row_is_the_oracles(oracle: Oracle, cell: tuple[bool, bool, bool, int], capture: str) -> None:
    path, config = oracle
    overlap, chunked, graphs, moe_chunks = cell
    trtllm_r3.enable(capture=capture)
    options = settings(
        overlap=overlap,
        chunked=chunked,
        graphs=graphs,
        moe_chunks=moe_chunks,
        max_num_tokens=64 if chunked else 320,
    )
    asked = prompts(24, longest=300, vocab=config["vocab_size"])
    with engine(path, **options) as llm:
        outputs = together(llm, asked, [ask(max_tokens=1 + i % 17) for i in range(len(asked))])
        for output in outputs:
            check_oracle(output, config)


@hypothesis_settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_rows_are_exact_in_any_schedule(oracle: Oracle, data: st.DataObject) -> None:
    path, config = oracle
    trtllm_r3.enable()
    cell = data.draw(st.sampled_from(CELLS))
    overlap, chunked, graphs, moe_chunks = cell
    tokens = data.draw(st.sampled_from([33, 64, 100]))
    longest = 200 if chunked else tokens
    lengths = data.draw(
        st.lists(st.tuples(st.integers(1, longest), st.integers(1, 24)), min_size=1, max_size=14)
    )
    batch = data.draw(st.integers(1, 8))
    asked = [
        p[:n] * (-(-n // len(p)))
        for n, p in zip(
            [n for n, _ in lengths],
            prompts(len(lengths), longest=longest, vocab=config["vocab_size"]),
            strict=True,
        )
    ]
    asked = [p[:n] for p, (n, _) in zip(asked, lengths, strict=True)]
    options = settings(
        overlap=overlap, chunked=chunked, graphs=graphs, moe_chunks=moe_chunks, max_num_tokens=tokens
    )
    with engine(path, **{**options, "max_batch_size": batch}) as llm:
        for output in together(llm, asked, [ask(max_tokens=n) for _, n in lengths]):
            check_oracle(output, config)
