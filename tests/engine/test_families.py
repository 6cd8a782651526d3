"""Rows of real architectures equal those of transformers' own routers, for requests that end in every way."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from support import checkpoints
from support.rollouts import ask, engine, prompts, sequence, settings, unexplained
from support.tokens import character_tokenizer, text_of

import trtllm_r3

FAMILIES = {
    "qwen3_moe": checkpoints.tiny_qwen3_moe,
    "mixtral": checkpoints.tiny_mixtral,
    "deepseek_v3": checkpoints.tiny_deepseek_v3,
}
CELLS = list(itertools.product([True, False], [True, False], [True, False], [1, 3]))
PAIRWISE = {(True, True, True, 3), (False, False, False, 1), (True, False, False, 1), (False, True, True, 1)}


@pytest.fixture(scope="session", params=list(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(FAMILIES[request.param](tmp_path_factory.mktemp(request.param)))


def mixed_requests(llm: Any, count: int, longest: int) -> list[Any]:
    """Finished outputs of `count` requests that end by length, end id, stop id, stop string or cancel."""
    asked = prompts(count, longest=longest, vocab=96, seed=5)
    plain = llm.generate(asked[: count // 2], [ask(max_tokens=24)] * (count // 2), use_tqdm=False)
    endings: list[dict[str, Any]] = []
    for output in plain:
        answer = output.outputs[0].token_ids
        endings += [{"end_id": answer[9]}, {"stop_token_ids": [answer[4]]}, {"stop": text_of(answer[6:8])}]
    futures = []
    for i, prompt in enumerate(asked[count // 2 :]):
        ending = endings[(3 * (i // 2) + i) % len(endings)] if i % 5 else {}
        keep = {"include_stop_str_in_output": True} if i % 2 else {}
        source = plain[i // 2].prompt_token_ids if ending else prompt
        futures.append(
            llm.generate_async(
                source, ask(max_tokens=1 + (7 * i) % 40 if not ending else 40, **ending, **keep)
            )
        )
        if i % 7 == 3:
            futures[-1].abort()
    return [*plain, *(f.result() for f in futures)]


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, id="-".join(map(str, map(int, c))), marks=[] if c in PAIRWISE else pytest.mark.slow)
        for c in CELLS
    ],
)
def test_every_row_is_what_transformers_routes(checkpoint: str, cell: tuple[bool, bool, bool, int]) -> None:
    overlap, chunked, graphs, moe_chunks = cell
    options = settings(
        overlap=overlap,
        chunked=chunked,
        graphs=graphs,
        moe_chunks=moe_chunks,
        max_num_tokens=64 if chunked else 320,
    )
    with engine(
        checkpoint, tokenizer=character_tokenizer(), **{**options, "skip_tokenizer_init": False}
    ) as llm:
        outputs = mixed_requests(llm, 50, 300)
    endings = {o.outputs[0].finish_reason for o in outputs}
    assert endings >= {"length", "stop"}
    rows = wrong = ties = 0
    for output in outputs:
        tokens, routes = sequence(output), trtllm_r3.routes_of(output.outputs[0])
        if routes.ids is None:
            assert output.outputs[0].finish_reason in ("cancelled", "stop"), routes
            assert routes.why_none
            continue
        assert routes.complete, routes.gaps
        assert len(routes) == len(tokens) - 1
        ids, scores = (
            checkpoints.hf_routes(checkpoint, tokens[:-1]) if len(routes) else (routes.ids.long(), routes.ids)
        )
        assert all(np.unique(row).size == row.size for row in routes.ids.flatten(0, 1).numpy())
        more, tied = unexplained(routes.ids, ids, scores)
        rows, wrong, ties = rows + len(routes), wrong + more, ties + tied
    assert wrong == 0
    assert ties <= rows * 4 * 0.001


def test_tokens_are_the_same_with_the_plugin_on_and_off(checkpoint: str) -> None:
    from tensorrt_llm import SamplingParams

    asked = prompts(12, longest=120, vocab=96, seed=9)
    options = settings()
    sampling = [
        {"max_tokens": 12, "end_id": -1, "temperature": 0.9, "top_p": 0.9, "seed": i} for i in range(12)
    ]
    with engine(checkpoint, routes=False, **options) as llm:
        off = [
            o.outputs[0].token_ids
            for o in llm.generate(asked, [SamplingParams(**s) for s in sampling], use_tqdm=False)
        ]
    with engine(checkpoint, **options) as llm:
        on = llm.generate(asked, [ask(**s) for s in sampling], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in on] == off
    assert all(isinstance(o.outputs[0].routed_experts, torch.Tensor) for o in on)
