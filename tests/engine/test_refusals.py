"""Set-ups whose routes would be wrong are refused when the LLM is built, by name, with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from support.rollouts import ask, check_oracle, engine, settings, together

import trtllm_r3
from trtllm_r3.errors import NotReadyError, UnsupportedError

Oracle = tuple[str, dict[str, Any]]


def cause_chain(error: BaseException) -> str:
    text, link = "", error
    while link is not None:
        text, link = f"{text}\n{type(link).__name__}: {link}", link.__cause__ or link.__context__
    return text


@pytest.mark.parametrize(
    ("option", "value"),
    [("pipeline_parallel_size", 2), ("max_beam_width", 2), ("context_parallel_size", 2)],
)
def test_an_engine_option_that_mixes_rows_is_refused_by_name(oracle: Oracle, option: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=option), engine(oracle[0], **{option: value}):
        pass


def test_speculative_decoding_is_refused_by_name(oracle: Oracle) -> None:
    from tensorrt_llm.llmapi import llm_args

    speculative = next(
        (
            getattr(llm_args, n)
            for n in ("NGramDecodingConfig", "MTPDecodingConfig", "DecodingBaseConfig")
            if hasattr(llm_args, n)
        ),
        None,
    )
    value = (
        {"decoding_type": "NGram", "max_draft_len": 2}
        if speculative is None
        else speculative(max_draft_len=2)
    )
    with (
        pytest.raises(UnsupportedError, match="speculative_config"),
        engine(oracle[0], speculative_config=value),
    ):
        pass


@pytest.mark.parametrize("configurable", ["1", "0"])
def test_a_backend_that_routes_inside_its_kernel_is_refused_with_layer_class_and_remedy(
    oracle: Oracle, configurable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorrt_llm.llmapi import MoeConfig

    monkeypatch.setenv("ENABLE_CONFIGURABLE_MOE", configurable)
    with pytest.raises(Exception) as caught, engine(oracle[0], moe_config=MoeConfig(backend="TRTLLM")):
        pass
    told = cause_chain(caught.value)
    assert "UnsupportedError" in told
    for part in (
        "layers.1",
        "inside its kernel",
        "CUTLASS",
        "TRTLLMGenFusedMoE" if configurable == "0" else "Configurable",
    ):
        assert part in told


def test_routing_is_taken_out_of_the_kernel_where_the_user_wants_it(oracle: Oracle) -> None:
    from tensorrt_llm.llmapi import MoeConfig

    path, config = oracle
    trtllm_r3.enable(fused="separate")
    with engine(path, **{**settings(), "moe_config": MoeConfig(backend="TRTLLM")}) as llm:
        [output] = together(llm, [[5, 6, 7]], [ask()])
    check_oracle(output, config)


def test_without_the_option_the_same_backend_works(oracle: Oracle) -> None:
    from tensorrt_llm.llmapi import MoeConfig

    with engine(oracle[0], routes=False, moe_config=MoeConfig(backend="TRTLLM")) as llm:
        [output] = llm.generate([[5, 6, 7]], _plain(), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def _plain() -> Any:
    from tensorrt_llm import SamplingParams

    return SamplingParams(max_tokens=4, end_id=-1)


def test_an_unknown_path_that_never_calls_the_router_is_found_by_coverage(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtllm_r3.trtllm import engine as module

    monkeypatch.setattr(module, "check_sites", lambda sites, separate: None)
    from tensorrt_llm.llmapi import MoeConfig

    with pytest.raises(Exception) as caught, engine(oracle[0], moe_config=MoeConfig(backend="TRTLLM")):
        pass
    assert "never went through the router" in cause_chain(caught.value)


def test_a_missing_hook_closes_the_gate(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest

    trtllm_r3.disable()
    monkeypatch.delattr(LlmRequest, "create_response")
    with pytest.raises(Exception) as caught, engine(oracle[0]):
        pass
    assert NotReadyError.__name__ in cause_chain(caught.value)
    assert "create_response" in cause_chain(caught.value)


def test_not_enabled_means_the_very_same_function_objects(oracle: Oracle) -> None:
    from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine
    from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
    from tensorrt_llm.executor.result import CompletionOutput
    from tensorrt_llm.sampling_params import SamplingParams

    watched = [
        (PyTorchModelEngine, "forward"),
        (PyExecutor, "__init__"),
        (SamplingParams, "__init__"),
        (SamplingParams, "_return_log_probs"),
    ]
    before = [vars(owner)[name] for owner, name in watched]
    trtllm_r3.enable()
    assert all(vars(owner)[name] is not old for (owner, name), old in zip(watched, before, strict=True))
    trtllm_r3.disable()
    assert all(vars(owner)[name] is old for (owner, name), old in zip(watched, before, strict=True))
    assert not hasattr(CompletionOutput, "routed_experts")
