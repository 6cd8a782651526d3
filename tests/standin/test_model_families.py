"""The models of the stand-in against transformers' implementation of the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.checkpoints import (  # noqa: E402
    hf_logits,
    hf_routes,
    tiny_deepseek_v3,
    tiny_mixtral,
    tiny_qwen3_moe,
)
from support.model_runner import ModelRunner, record_routes  # noqa: E402

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
CASES: dict[str, tuple[Callable[..., str], dict[str, Any]]] = {
    "qwen3": (tiny_qwen3_moe, {}),
    "qwen3 without norm, tied, biased, split": (
        tiny_qwen3_moe,
        {
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "max_shard_size": "40KB",
        },
    ),
    "qwen3 yarn, many experts": (
        tiny_qwen3_moe,
        {"rope_parameters": YARN, "num_experts": 160, "num_experts_per_tok": 9, "num_hidden_layers": 2},
    ),
    "mixtral": (tiny_mixtral, {}),
    "mixtral llama3 rope": (tiny_mixtral, {"rope_parameters": LLAMA3}),
    "deepseek": (tiny_deepseek_v3, {}),
    "deepseek yarn, no q lora, one group": (
        tiny_deepseek_v3,
        {"q_lora_rank": None, "rope_parameters": YARN, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
    ),
    "deepseek wide values, not interleaved": (
        tiny_deepseek_v3,
        {"v_head_dim": 24, "rope_interleave": False, "attention_bias": True, "rope_parameters": LINEAR},
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    make, options = CASES[request.param]
    return make(tmp_path_factory.mktemp("model"), seed=3, **options)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def assert_routes(calls: dict[int, list[torch.Tensor]], path: str, sequence: list[int]) -> None:
    ids, scores = hf_routes(path, sequence)
    assert ids.shape[:2] == (len(sequence), len(calls))
    for ordinal, layer in enumerate(sorted(calls)):
        ours, theirs = torch.cat(calls[layer]).sort(-1).values, ids[:, ordinal].sort(-1).values
        differ = (ours != theirs).any(-1)
        top = scores[differ, ordinal].topk(ids.shape[-1] + 1).values
        assert bool((top[:, -2] - top[:, -1] < 1e-6).all()), "ids differ without a tie"
        assert differ.float().mean() < 0.01


def test_whole_prefill_gives_the_logits_and_routes_of_transformers(checkpoint: str) -> None:
    runner, sequence = ModelRunner(checkpoint), tokens(83)
    calls = record_routes(runner.model)
    assert_close(runner.step({7: sequence}, everything=True), hf_logits(checkpoint, sequence))
    assert_routes(calls, checkpoint, sequence)


def test_chunks_and_decoding_give_the_logits_and_routes_of_transformers(checkpoint: str) -> None:
    runner, sequence = ModelRunner(checkpoint), tokens(60, seed=1)
    calls = record_routes(runner.model)
    rows = [runner.step({0: sequence[a:b]}, everything=True) for a, b in ((0, 5), (5, 21), (21, 40))]
    rows += [runner.step(generations={0: token}) for token in sequence[40:]]
    assert_close(torch.cat(rows), hf_logits(checkpoint, sequence))
    assert_routes(calls, checkpoint, sequence)


def test_sequences_of_one_step_do_not_see_each_other(checkpoint: str) -> None:
    runner = ModelRunner(checkpoint, max_num_tokens=64, moe_max_num_tokens=7)
    prompts = {0: tokens(9, 2), 1: tokens(30, 3), 2: tokens(17, 4)}
    runner.step({0: prompts[0][:-1]})
    last = runner.step({1: prompts[1][:12], 2: prompts[2][:-1]}, {0: prompts[0][-1]})
    assert_close(last[2], hf_logits(checkpoint, prompts[0])[-1])
    last = runner.step({1: prompts[1][12:]}, {2: prompts[2][-1]})
    assert_close(last[0], hf_logits(checkpoint, prompts[1])[-1])
    assert_close(last[1], hf_logits(checkpoint, prompts[2])[-1])


@pytest.mark.parametrize("backend", ["TRTLLM", "VANILLA"])
@pytest.mark.parametrize("configurable", ["1", "0"])
def test_every_moe_backend_gives_the_logits_of_transformers(
    checkpoint: str, backend: str, configurable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    runner, sequence = ModelRunner(checkpoint, moe_backend=backend, moe_max_num_tokens=9), tokens(25, seed=5)
    calls = record_routes(runner.model)
    assert_close(runner.step({0: sequence}, everything=True), hf_logits(checkpoint, sequence))
    assert all(bool(rows) == (backend == "VANILLA") for rows in calls.values()), "TRTLLM routes in its kernel"


def test_packed_experts_and_older_configs_load_as_the_others_do(checkpoint: str, tmp_path: Path) -> None:
    import json

    from safetensors.torch import save_file
    from support.checkpoints import hf_model

    model, sequence = hf_model(checkpoint), tokens(20, seed=6)
    weights = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_close(
        ModelRunner(str(tmp_path)).step({0: sequence}, everything=True), hf_logits(checkpoint, sequence)
    )
