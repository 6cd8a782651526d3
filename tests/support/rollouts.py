"""Runs requests on the stand-in engine by stock names alone, and checks each row of what comes back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import trtllm_r3

from .oracle import expected_continuation, expected_ids

SMALL = {"max_batch_size": 8, "max_num_tokens": 64, "max_seq_len": 512, "skip_tokenizer_init": True}


@contextlib.contextmanager
def engine(
    model: str, *, routes: bool = True, kv_tokens: int = 4096, reuse: bool = False, **options: Any
) -> Iterator[Any]:
    """An LLM of the stand-in in this process, returning routes. Stock options pass through."""
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import KvCacheConfig

    os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    if routes and not trtllm_r3.status()["enabled"]:
        trtllm_r3.enable()
    if routes:
        options["enable_return_routed_experts"] = True
    cache = KvCacheConfig(enable_block_reuse=reuse, max_tokens=kv_tokens)
    with LLM(model=str(model), **{**SMALL, "kv_cache_config": cache, **options}) as llm:
        yield llm


def settings(
    *,
    overlap: bool = True,
    chunked: bool = True,
    graphs: bool = True,
    moe_chunks: int = 1,
    max_num_tokens: int = 64,
) -> dict[str, Any]:
    """Engine options of one cell of the feature matrix."""
    from tensorrt_llm.llmapi import CudaGraphConfig, MoeConfig

    return {
        "disable_overlap_scheduler": not overlap,
        "enable_chunked_prefill": chunked,
        "cuda_graph_config": CudaGraphConfig(batch_sizes=[1, 2, 4, 8], enable_padding=True)
        if graphs
        else None,
        "moe_config": MoeConfig(max_num_tokens=None if moe_chunks == 1 else -(-max_num_tokens // moe_chunks)),
        "max_num_tokens": max_num_tokens,
    }


def cached(kv_tokens: int = 4096, policy: str = "GUARANTEED_NO_EVICT", **options: Any) -> dict[str, Any]:
    """`settings` with small KV blocks that are reused unless told otherwise."""
    from tensorrt_llm.llmapi import CapacitySchedulerPolicy, KvCacheConfig, SchedulerConfig

    cache = {name: options.pop(name) for name in set(options) & set(KvCacheConfig.model_fields)}
    return {
        **settings(**options),
        "kv_cache_config": KvCacheConfig(
            **{"enable_block_reuse": True, "max_tokens": kv_tokens, "tokens_per_block": 8, **cache}
        ),
        "scheduler_config": SchedulerConfig(capacity_scheduler_policy=CapacitySchedulerPolicy[policy]),
    }


def ask(**options: Any) -> Any:
    """SamplingParams that ask for routes; greedy, ends only by length unless told otherwise."""
    from tensorrt_llm import SamplingParams

    return SamplingParams(**{"return_routed_experts": True, "end_id": -1, "max_tokens": 8, **options})


def prompts(count: int, *, longest: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 .. longest tokens, short and long ones mixed."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    lengths[: count // 4] = rng.integers(1, 6, count // 4)
    return [rng.integers(3, vocab, n).tolist() for n in lengths.tolist()]


def sequence(output: Any, index: int = 0) -> list[int]:
    """Prompt and answer of one output."""
    return [*output.prompt_token_ids, *output.outputs[index].token_ids]


def check_oracle(
    output: Any,
    config: Mapping[str, Any],
    *,
    start: int = 0,
    version: int = 0,
    index: int = 0,
    greedy: bool = True,
) -> None:
    """Each row is the oracle's, none is missing, and so are the tokens (greedy)."""
    tokens, completion = sequence(output, index), output.outputs[index]
    if greedy:
        prompt = output.prompt_token_ids
        assert completion.token_ids == expected_continuation(prompt, len(completion.token_ids), config)
    rows = np.arange(start, len(tokens) - 1)
    want = expected_ids(np.asarray(tokens)[rows], rows, None, config, version)
    routes = trtllm_r3.routes_of(completion)
    assert routes.gaps == (), f"{routes}: {routes.gaps}"
    got = completion.routed_experts
    assert got.dtype == torch.int16
    assert got.shape == want.shape
    assert np.array_equal(got.numpy(), want)
    assert routes.complete
    assert routes.start == start
    assert list(routes.positions) == rows.tolist()


def check_with_gaps(output: Any, config: Mapping[str, Any], missing: Mapping[int, str]) -> None:
    """The rows of exactly these positions are missing, with these causes; every id that is there is the oracle's."""
    tokens, completion = sequence(output), output.outputs[0]
    want = expected_ids(tokens[:-1], None, None, config)
    routes = trtllm_r3.routes_of(completion)
    assert routes.ids is not None
    got = routes.ids.numpy()
    assert got.shape == want.shape
    found = {p: gap.cause for gap in routes.gaps for p in range(gap.start, gap.stop)}
    assert found == dict(missing)
    assert sorted(found) == torch.nonzero(routes.missing).flatten().tolist()
    there = got >= 0
    assert np.array_equal(got[there], want[there])


def same_sets(ids: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """bool [T, L]: whether both chose the same experts, in whatever order."""
    return (ids.long().sort(-1).values == want.long().sort(-1).values).all(-1)


def unexplained(
    ids: torch.Tensor, want: torch.Tensor, scores: torch.Tensor, tie: float = 1e-5
) -> tuple[int, int]:
    """(rows that differ for no reason, rows that differ by a tie) of ids [T, L, K] against scores [T, L, E].

    A tie: the scores of the ids on which the two differ lie within `tie` of the row's range.
    """
    wrong = ties = 0
    for row, layer in torch.nonzero(~same_sets(ids, want)).tolist():
        score = scores[row, layer]
        finite = score[score.isfinite()]
        mine, theirs = set(ids[row, layer].tolist()), set(want[row, layer].tolist())
        lowest = min(float(score[e]) for e in mine - theirs)
        highest = max(float(score[e]) for e in theirs - mine)
        close = highest - lowest <= tie * float(finite.max() - finite.min())
        ties, wrong = ties + close, wrong + (not close)
    return wrong, ties


def together(llm: Any, requests: Sequence[Sequence[int]], params: Sequence[Any] | Any) -> list[Any]:
    """All requests at once, without a progress bar."""
    return list(llm.generate([list(r) for r in requests], params, use_tqdm=False))
