"""Text while it is generated; the routes come with the last piece."""

import asyncio
import tempfile

import trtllm_r3
from trtllm_r3 import standin

standin.install()
trtllm_r3.enable(default_return=True)  # for every request, without asking each time

from tensorrt_llm import LLM, SamplingParams  # noqa: E402

from trtllm_r3.cli.demo import build_checkpoint  # noqa: E402


async def stream(llm: LLM, prompt: str) -> None:
    """Take pieces as they come, then the routes."""
    pieces: list[str] = []
    async for output in llm.generate_async(prompt, SamplingParams(max_tokens=12), streaming=True):
        answer = output.outputs[0]
        pieces.append(answer.text_diff)
        if not output.finished:
            assert answer.routed_experts is None
    print(f"{prompt!r}: {len(pieces)} pieces, {trtllm_r3.routes_of(answer)}")
    assert "".join(pieces) == answer.text
    assert len(answer.routed_experts) == len(output.prompt_token_ids) + len(answer.token_ids) - 1


async def both(llm: LLM) -> None:
    """Two requests at once."""
    await asyncio.gather(stream(llm, "The assert statement"), stream(llm, "A class definition"))


def main() -> None:
    """Build the engine, run the loop."""
    model = build_checkpoint(tempfile.mkdtemp())
    with LLM(model=model, enable_return_routed_experts=True, max_batch_size=4) as llm:
        asyncio.run(both(llm))


if __name__ == "__main__":
    main()
