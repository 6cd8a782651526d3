"""Options of engine and request: checked, completed, refused by name, and carried to the worker."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import trtllm_r3.standin

trtllm_r3.standin.install()

import tensorrt_llm  # noqa: E402
from support import pool_tasks  # noqa: E402
from support.fake_engine import InProcess, InWorker  # noqa: E402
from tensorrt_llm import LLM, SamplingParams  # noqa: E402
from tensorrt_llm.bindings.executor import Request, SamplingConfig  # noqa: E402
from tensorrt_llm.executor.worker import worker_main  # noqa: E402
from tensorrt_llm.inputs import get_cache_salt_id  # noqa: E402
from tensorrt_llm.llmapi import (  # noqa: E402
    CapacitySchedulerPolicy,
    CudaGraphConfig,
    KvCacheConfig,
    MoeConfig,
    MTPDecodingConfig,
    SchedulerConfig,
    TorchLlmArgs,
)
from tensorrt_llm.llmapi.mpi_session import MpiPoolSession  # noqa: E402
from tensorrt_llm.mapping import Mapping  # noqa: E402


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def build(model_dir: Path, **options: Any) -> LLM:
    return LLM(model=model_dir, skip_tokenizer_init=True, executor_cls=InProcess, **options)


def test_the_version_tells_that_this_is_not_stock():
    assert tensorrt_llm.__version__ == "1.2.0+standin"


def test_an_unknown_option_is_an_error(model_dir):
    with pytest.raises(ValueError, match="LLM got invalid argument: max_batch_sizes"):
        build(model_dir, max_batch_sizes=3)
    with pytest.raises(ValueError, match="max_token"):
        KvCacheConfig(max_token=3)


def test_a_model_that_is_no_directory_of_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="is not a directory with a config"):
        build(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"moe_expert_parallel_size": 2}, "moe_expert_parallel_size=2"),
        ({"max_beam_width": 4}, "max_beam_width=4"),
        ({"speculative_config": MTPDecodingConfig()}, "speculative_config=MTPDecodingConfig"),
        ({"orchestrator_type": "ray"}, "orchestrator_type='ray'"),
        ({"num_postprocess_workers": 2}, "num_postprocess_workers=2"),
        ({"enable_lora": True}, "enable_lora=True"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend='xgrammar'"),
        ({"backend": "_autodeploy"}, "backend='_autodeploy'"),
        ({"load_format": "dummy"}, "load_format"),
        ({"attn_backend": "FLASHINFER"}, "attn_backend='FLASHINFER'"),
        ({"sampler_type": "TRTLLMSampler"}, "sampler_type"),
        ({"revision": "main"}, "revision='main'"),
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"kv_cache_config": KvCacheConfig(host_cache_size=1)}, "kv_cache_config.host_cache_size=1"),
        (
            {"kv_cache_config": KvCacheConfig(event_buffer_max_size=9)},
            "kv_cache_config.event_buffer_max_size=9",
        ),
        ({"moe_config": MoeConfig(backend="WIDEEP")}, "moe_config.backend='WIDEEP'"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_when_it_is_built(model_dir, options, words):
    TorchLlmArgs(model=model_dir, skip_tokenizer_init=True, **options)
    with pytest.raises(ValueError, match=words):
        build(model_dir, **options)


def test_the_engine_gets_the_options_as_given(model_dir):
    options = {
        "max_batch_size": 4,
        "max_num_tokens": 33,
        "kv_cache_config": KvCacheConfig(max_tokens=99, tokens_per_block=4, enable_block_reuse=False),
        "scheduler_config": SchedulerConfig(
            capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION
        ),
        "moe_config": MoeConfig(backend="CUTLASS", max_num_tokens=16),
        "cuda_graph_config": None,
        "disable_overlap_scheduler": True,
        "enable_chunked_prefill": True,
    }
    with build(model_dir, **options) as llm:
        args = llm._executor.llm_args
        assert {name: getattr(args, name) for name in options} == options


def test_the_arguments_travel_with_hidden_attributes_but_without_the_session(model_dir):
    args = TorchLlmArgs(model=model_dir, skip_tokenizer_init=True, _mpi_session=object(), max_batch_size=3)
    object.__setattr__(args, "_hidden", {"a": 1})
    for travelled in (
        pickle.loads(pickle.dumps(args)),
        copy.deepcopy(args.model_copy(update={"mpi_session": None})),
    ):
        assert travelled._hidden == {"a": 1}
        assert (travelled.max_batch_size, travelled.mpi_session) == (3, None)
        assert travelled.parallel_config.world_size == 1


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"max_batch_size": 4}, [1, 2, 3, 4]),
        ({"max_batch_size": 40}, [*range(1, 33), 40]),
        ({"max_batch_size": 300}, [*range(1, 33), 64, 128, 256, 300]),
        ({"max_batch_size": 20, "enable_padding": True}, [1, 2, 4, 8, 16, 20]),
        ({"batch_sizes": [8, 2]}, [2, 8]),
        ({}, [*range(1, 33), 64, 128]),
    ],
)
def test_graph_sizes_follow_from_what_is_given(options, sizes):
    config = CudaGraphConfig(**options)
    assert (config.batch_sizes, config.max_batch_size) == (sizes, sizes[-1])


def test_graph_sizes_that_contradict_each_other_are_an_error():
    with pytest.raises(ValueError, match="max_batch_size"):
        CudaGraphConfig(batch_sizes=[1, 2], max_batch_size=3)


def test_a_longest_prompt_is_held_where_it_is_set(model_dir):
    params = SamplingParams(end_id=9, max_tokens=1)
    with build(model_dir, max_input_len=3) as llm, pytest.raises(ValueError, match=r"max_input_len \(3\)"):
        llm.generate_async([1] * 4, params)
    with build(model_dir, max_seq_len=2000) as llm:
        assert llm.generate([1] * 1500, params, use_tqdm=False).finished


def test_environment_overrides_reach_this_process_and_a_worker_that_started_before(model_dir):
    session = MpiPoolSession(n_workers=1)
    assert session.submit_sync(pool_tasks.where_am_i, "TLLM_FAKE_NOTE")[0][2] is None
    options = {"skip_tokenizer_init": True, "enable_iter_perf_stats": True, "_mpi_session": session}
    with LLM(model=model_dir, executor_cls=InWorker, env_overrides={"TLLM_FAKE_NOTE": "7"}, **options) as llm:
        assert os.environ["TLLM_FAKE_NOTE"] == "7"
        llm.generate([1], SamplingParams(end_id=9, max_tokens=1), use_tqdm=False)
        assert llm.get_stats(timeout=1) == [{"iter": 1, "note": "7"}]


def test_the_workers_main_function_has_stocks_parameters():
    assert list(inspect.signature(worker_main).parameters) == [
        "engine",
        "worker_queues",
        "log_level",
        "executor_config",
        "batched_logits_processor",
        "worker_cls",
        "tracer_init_kwargs",
        "_torch_model_class_mapping",
        "postproc_worker_config",
        "ready_signal",
        "is_llm_executor",
        "hf_model_dir",
        "tokenizer",
        "llm_args",
    ]


# ---- requests ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 2, "best_of": 1, "temperature": 1.0}, "best_of"),
        ({"n": 2}, "greedy"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_values_out_of_range_are_errors(options, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**options)


def test_sampling_params_are_a_slots_dataclass_that_travels_with_its_private_fields():
    params = SamplingParams(end_id=3, stop_token_ids=[1])
    params._stop_word_ids, params._stream_interval, params._return_log_probs = [[4]], 2, True
    with pytest.raises(AttributeError):
        params.unknown = 1
    with pytest.raises(TypeError):
        SamplingParams(5)
    for travelled in (pickle.loads(pickle.dumps(params)), copy.copy(params), copy.deepcopy(params)):
        assert travelled == params
        assert travelled._stream_interval == 2


def test_sampling_params_become_the_executors_configs():
    params = SamplingParams(n=3, temperature=0.5, top_k=7, seed=11, min_tokens=2, logprobs=True)
    assert params._get_sampling_config() == SamplingConfig(
        num_return_sequences=3, temperature=0.5, top_k=7, seed=11, min_tokens=2
    )
    output = params._get_output_config(is_pytorch_backend=True)
    assert (output.return_log_probs, output.exclude_input_from_output, params.logprobs) == (True, True, 1)


def test_stop_words_are_ids_then_strings_and_need_encoding():
    params = SamplingParams(stop_token_ids=[8], stop=["x"])
    with pytest.raises(RuntimeError, match="not encoded"):
        params._get_stop_words()
    params._stop_word_ids = [[1, 2]]
    assert params._get_stop_reasons_and_words() == [(8, [8]), ("x", [1, 2])]


def test_a_pickled_request_keeps_its_fields_and_loses_what_was_put_on_it():
    request = Request(input_token_ids=[1, 2], max_tokens=3, client_id=4)
    request.py_extra = 5  # type: ignore[attr-defined]
    travelled = pickle.loads(pickle.dumps(request))
    assert (travelled.input_token_ids, travelled.max_tokens, travelled.client_id) == ([1, 2], 3, 4)
    assert not hasattr(travelled, "py_extra")
    for bad in ({"input_token_ids": [], "max_tokens": 1}, {"input_token_ids": [1], "max_tokens": 0}):
        with pytest.raises(ValueError, match="at least"):
            Request(**bad)


def test_salts_become_numbers_that_tell_them_apart():
    assert get_cache_salt_id("a") == get_cache_salt_id("a") != get_cache_salt_id("b")
    assert 0 < get_cache_salt_id("a") < 1 << 64


def test_a_mapping_places_each_rank():
    ranks = [Mapping(8, rank, tp_size=4, pp_size=2, moe_ep_size=2) for rank in range(8)]
    assert [(m.pp_rank, m.tp_rank, m.moe_tp_rank, m.moe_ep_rank) for m in ranks] == [
        (pp, tp, tp // 2, tp % 2) for pp in range(2) for tp in range(4)
    ]
    assert [m.pp_layers(5) for m in (ranks[0], ranks[4])] == [[0, 1, 2], [3, 4]]
    with pytest.raises(ValueError, match="world_size"):
        Mapping(3, tp_size=2)


def test_none_means_the_default_size(model_dir):
    args = TorchLlmArgs(model=model_dir, skip_tokenizer_init=True, max_batch_size=None, max_num_tokens=None)
    assert (args.max_batch_size, args.max_num_tokens, args.max_seq_len) == (2048, 8192, None)
