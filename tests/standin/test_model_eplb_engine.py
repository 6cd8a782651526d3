"""The stand-in's expert load balancer: what it refuses, and an engine whose experts move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.checkpoints import tiny_qwen3_moe  # noqa: E402
from support.eplb import layer, placed  # noqa: E402
from support.rollouts import engine, prompts, settings  # noqa: E402
from tensorrt_llm import SamplingParams  # noqa: E402
from tensorrt_llm._torch.modules.fused_moe.moe_load_balancer import MoeLoadBalancer  # noqa: E402
from tensorrt_llm.llmapi import MoeConfig, MoeLoadBalancerConfig, TorchLlmArgs  # noqa: E402
from tensorrt_llm.llmapi.llm_args_check import check_supported  # noqa: E402

REMAPS = pytest.mark.parametrize("remap", ["out", "in"])


@pytest.mark.parametrize(
    ("balancer", "options", "message"),
    [
        (placed(slots=[0, 1, 2, 3, 4, 4]), {}, "each of 6 experts"),
        (MoeLoadBalancerConfig(num_slots=5), {}, "num_slots=5 is less than 6 experts"),
        (MoeLoadBalancerConfig(), {}, "num_slots=None"),
        (placed(), {"moe_backend": "TRTLLM"}, "load balancer is on"),
    ],
)
def test_what_cannot_be_placed_is_an_error(
    balancer: MoeLoadBalancerConfig, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layer(balancer, **options)


def test_unknown_layers_remaps_and_ranks_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="no layer 4"):
        layer(MoeLoadBalancerConfig(num_slots=6, initial_global_assignments={1: list(range(6))}))
    with pytest.raises(ValueError, match="ep_size=2"):
        MoeLoadBalancer(0, 2, 0)
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", "aside")
    with pytest.raises(ValueError, match="TLLM_STANDIN_EPLB_REMAP='aside'"):
        layer(placed())


@pytest.mark.parametrize(
    ("moe_config", "message"),
    [
        (MoeConfig(load_balancer="eplb.yaml"), "load_balancer='eplb.yaml'"),
        (MoeConfig(load_balancer={"layer_updates_per_iter": 1}), "num_slots=None"),
        (MoeConfig(load_balancer={"num_slots": 8}, backend="VANILLA"), "backend='VANILLA'"),
        (MoeConfig(load_balancer={"num_slots": 8}, backend="TRTLLM"), "backend='TRTLLM'"),
    ],
)
def test_options_that_cannot_be_honoured_are_named(moe_config: MoeConfig, message: str) -> None:
    args = TorchLlmArgs(model="/nowhere", skip_tokenizer_init=True, moe_config=moe_config)
    with pytest.raises(ValueError, match=message):
        check_supported(args)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("qwen3_moe")
    return tiny_qwen3_moe(path)


@REMAPS
@pytest.mark.parametrize(("graphs", "moe_chunks", "configurable"), [(True, 1, "1"), (False, 3, "0")])
def test_an_engine_that_moves_experts_says_the_same_tokens(
    qwen: str, monkeypatch: pytest.MonkeyPatch, remap: str, graphs: bool, moe_chunks: int, configurable: str
) -> None:
    monkeypatch.setenv("TLLM_STANDIN_EPLB_REMAP", remap)
    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    asked = prompts(9, longest=60, vocab=96, seed=3)
    options = settings(graphs=graphs, moe_chunks=moe_chunks)
    sampling = SamplingParams(max_tokens=16, end_id=-1)
    with engine(qwen, routes=False, **options) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(asked, sampling, use_tqdm=False)]
    balanced = MoeLoadBalancerConfig(
        num_slots=16,
        initial_global_assignments={i: [0] * 4 + [(7 * e + i) % 12 for e in range(12)] for i in range(4)},
        layer_updates_per_iter=1,
    )
    moe_config = options["moe_config"].model_copy(update={"load_balancer": balanced})
    with engine(qwen, routes=False, **{**options, "moe_config": moe_config}) as llm:
        balancer = llm._executor.engine.model_engine.moe_load_balancer
        singles = balancer.single_layer_load_balancers
        first = [list(single.slot_experts) for single in singles]
        assert first == [balanced.initial_global_assignments[i] for i in range(4)], "warm-up moves nothing"
        assert all(int(single.expert_loads.sum()) == 0 for single in singles)
        moved = [o.outputs[0].token_ids for o in llm.generate(asked, sampling, use_tqdm=False)]
        assert moved == plain
        assert all(single.updates > 2 for single in singles)
        assert [single.slot_experts for single in singles] != first
        assert all(int(single.expert_loads.sum()) > 0 for single in singles)
