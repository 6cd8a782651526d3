"""A conversation of two turns: the second asks for the rows that the first has not brought already."""

import tempfile

import torch

import trtllm_r3
from trtllm_r3 import standin

standin.install()
trtllm_r3.enable()

from tensorrt_llm import LLM, SamplingParams  # noqa: E402
from tensorrt_llm.llmapi import KvCacheConfig  # noqa: E402

from trtllm_r3.cli.demo import build_checkpoint  # noqa: E402


def ask(llm: LLM, tokens: list[int], start: int = 0) -> tuple[list[int], torch.Tensor]:
    """The whole sequence after this turn, and its rows from position `start` on."""
    params = SamplingParams(max_tokens=10, return_routed_experts=True, routed_experts_start=start)
    answer = llm.generate(tokens, params, use_tqdm=False).outputs[0]
    routes = trtllm_r3.routes_of(answer)
    assert routes.start == start
    assert routes.complete
    return [*tokens, *answer.token_ids], routes.ids


def main() -> None:
    """Two turns; the joined rows are those of the whole conversation."""
    model = build_checkpoint(tempfile.mkdtemp())
    # Whose rows a partly matching block has can't always be proven; of whole blocks it can.
    cache = KvCacheConfig(enable_partial_reuse=False, max_tokens=1024)
    options = {"max_batch_size": 4, "kv_cache_config": cache}
    with LLM(model=model, enable_return_routed_experts=True, **options) as llm:
        question = llm.tokenizer.encode("What does the assert statement do?")
        first, rows = ask(llm, question)
        second = [*first, *llm.tokenizer.encode(" And with -O?")]
        whole, more = ask(llm, second, start=len(rows))
        _, everything = ask(llm, second)
    joined = torch.cat([rows, more])
    print(
        f"turn 1: rows 0..{len(rows) - 1}; turn 2: rows {len(rows)}..{len(joined) - 1} of {len(whole)} tokens"
    )
    assert len(joined) == len(whole) - 1
    assert torch.equal(joined.sort(-1).values, everything.sort(-1).values)


if __name__ == "__main__":
    main()
