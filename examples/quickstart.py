"""Which experts each token of a prompt and its answer went through.

Runs on the stand-in engine. Where TensorRT-LLM is installed, leave `standin.install()` out and name a model.
"""

import tempfile

import trtllm_r3
from trtllm_r3 import standin

standin.install()
trtllm_r3.enable()

from tensorrt_llm import LLM, SamplingParams  # noqa: E402

from trtllm_r3.cli.demo import build_checkpoint  # noqa: E402


def main() -> None:
    """Generate, print the routes, check their shape."""
    model = build_checkpoint(tempfile.mkdtemp())
    with LLM(model=model, enable_return_routed_experts=True, max_batch_size=4) as llm:
        params = SamplingParams(max_tokens=8, return_routed_experts=True)
        output = llm.generate("The assert statement", params, use_tqdm=False)
    answer = output.outputs[0]
    print(answer.routed_experts.shape, answer.routed_experts.dtype)
    print(answer.routed_experts[0])
    print(trtllm_r3.routes_of(answer))

    tokens = len(output.prompt_token_ids) + len(answer.token_ids)
    assert answer.routed_experts.shape == (tokens - 1, 4, 4)
    assert trtllm_r3.routes_of(answer).complete


if __name__ == "__main__":  # the engine runs in a worker process, which imports this file
    main()
