"""The oracle model against its definition in numpy, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.checkpoints import write_oracle_checkpoint  # noqa: E402
from support.model_runner import ModelRunner, record_routes  # noqa: E402
from support.oracle import (  # noqa: E402
    expected_continuation,
    expected_ids,
    expected_next_token,
    moe_layer_ids,
)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("oracle")
    return str(path), write_oracle_checkpoint(path)


def routes(calls: dict[int, list[torch.Tensor]]) -> np.ndarray:
    """Everything routed since the last call, `[rows, L, K]`."""
    stacked = torch.stack([torch.cat(calls[layer]) for layer in sorted(calls)], 1).numpy()
    for seen in calls.values():
        seen.clear()
    return stacked


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_routes_and_tokens_of_the_definition(
    oracle: tuple[str, dict[str, Any]], data: st.DataObject
) -> None:
    path, config = oracle
    runner = ModelRunner(path, max_num_tokens=64, moe_max_num_tokens=data.draw(st.sampled_from([3, 7, 64])))
    calls = record_routes(runner.model)
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, 96), min_size=1, max_size=20), min_size=1, max_size=5)
    )
    sequences = dict(enumerate(prompts))
    for _ in range(8):
        chunks, generations = {}, {}
        for key in data.draw(st.sets(st.sampled_from(sorted(sequences)), min_size=1)):
            seen, length = runner.seen.get(key, 0), len(sequences[key])
            if seen < len(prompts[key]):
                chunks[key] = sequences[key][seen : data.draw(st.integers(seen + 1, len(prompts[key])))]
            elif seen < length:
                generations[key] = sequences[key][seen]
        before = dict(runner.seen)
        logits = runner.step(chunks, generations)
        rows = routes(calls)
        start = 0
        for key, following in zip([*chunks, *generations], logits.argmax(-1).tolist(), strict=True):
            past, end = before.get(key, 0), runner.seen[key]
            assert (
                rows[start : start + end - past]
                == expected_ids(sequences[key][past:end], range(past, end), None, config)
            ).all()
            start += end - past
            assert following == expected_next_token(sequences[key][:end], config)
            if end == len(sequences[key]):
                sequences[key] = [*sequences[key], following]


def test_a_continuation_is_the_tokens_one_after_the_other(oracle: tuple[str, dict[str, Any]]) -> None:
    path, config = oracle
    runner, sequence = ModelRunner(path), [5, 6, 7]
    logits = runner.step({0: sequence})
    for _ in range(30):
        sequence.append(int(logits.argmax()))
        logits = runner.step(generations={0: sequence[-1]})
    assert sequence[3:] == expected_continuation([5, 6, 7], 30, config)
    assert len(set(sequence)) > 15


def test_all_rows_of_a_prompt_can_have_logits(oracle: tuple[str, dict[str, Any]]) -> None:
    path, config = oracle
    prompt = list(range(20, 45))
    logits = ModelRunner(path).step({0: prompt}, everything=True)
    assert logits.argmax(-1).tolist() == [expected_next_token(prompt[: i + 1], config) for i in range(25)]


@pytest.mark.parametrize(
    "fault", ["another block", "another position", "another layer's cache", "a lost token"]
)
def test_a_fault_in_the_cache_changes_the_token(oracle: tuple[str, dict[str, Any]], fault: str) -> None:
    path, config = oracle
    runner, prompt = ModelRunner(path), list(range(30, 50))
    runner.step({0: prompt[:-1]})
    if fault == "another block":
        runner.cache.blocks[0][1:3] = runner.cache.blocks[0][2:0:-1]
    ids, positions = runner.prepare({}, {0: prompt[-1]})
    if fault == "another position":
        positions = positions + 1
    elif fault == "another layer's cache":
        runner.cache.pool[2, runner.cache.blocks[0][0]] = runner.cache.pool[2, runner.cache.blocks[0][1]]
    elif fault == "a lost token":
        runner.cache.pool[4, runner.cache.blocks[0][0], :, 2] = 0
    assert int(runner.forward(ids, positions).argmax()) != expected_next_token(prompt, config)


def test_a_new_weight_version_changes_the_routes_and_not_the_tokens(
    oracle: tuple[str, dict[str, Any]],
) -> None:
    path, config = oracle
    runner, prompt = ModelRunner(path), list(range(30, 50))
    calls = record_routes(runner.model)
    first = runner.step({0: prompt})
    assert (routes(calls) == expected_ids(prompt, None, None, config)).all()
    runner.model.load_weights({"model.weight_version": torch.tensor(3)}, allow_partial_loading=True)
    assert torch.equal(runner.step({1: prompt}), first)
    later = expected_ids(prompt, None, None, config, version=3)
    assert (routes(calls) == later).all()
    assert (later != expected_ids(prompt, None, None, config)).any(-1).mean() > 0.9


def test_routes_are_distinct_and_never_constant() -> None:
    config = {"num_hidden_layers": 6, "first_k_dense_replace": 2, "num_experts": 16, "num_experts_per_tok": 4}
    ids = expected_ids(np.arange(200) % 5, None, None, config)
    assert ids.shape == (200, 4, 4)
    assert ids.dtype == np.int16
    assert all(len(set(row)) == 4 for row in ids.reshape(-1, 4).tolist())
    assert len({tuple(row) for row in ids.reshape(-1, 4).tolist()}) > 400
    assert set(ids.ravel().tolist()) == set(range(16))


def test_layers_of_the_oracle_are_registered_by_their_decoder_index(
    oracle: tuple[str, dict[str, Any]],
) -> None:
    path, config = oracle
    runner = ModelRunner(path)
    assert sorted(map(int, runner.model_config.extra_attrs["moe_layers"])) == moe_layer_ids(config)


@pytest.mark.parametrize(
    ("option", "value"), [("hidden_size", 1), ("num_experts_per_tok", 12), ("vocab_size", 1 << 24)]
)
def test_sizes_that_are_not_exact_are_refused(tmp_path: Path, option: str, value: int) -> None:
    import json

    from tensorrt_llm._torch.model_config import ModelConfig
    from tensorrt_llm._torch.models import AutoModelForCausalLM

    write_oracle_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, option: value}))
    with pytest.raises(ValueError, match=option):
        AutoModelForCausalLM.from_config(ModelConfig.from_pretrained(tmp_path))
