"""A step's tensors, static buffers and what a recorder sees of a model; checkpoints that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.checkpoints import (  # noqa: E402
    hf_logits,
    tiny_deepseek_v3,
    tiny_mixtral,
    tiny_qwen3_moe,
    write_oracle_checkpoint,
)
from support.model_runner import ModelRunner  # noqa: E402
from support.oracle import expected_next_token  # noqa: E402
from tensorrt_llm._torch.attention_backend import AttentionMetadata, get_attention_backend  # noqa: E402
from tensorrt_llm._torch.model_config import ModelConfig  # noqa: E402
from tensorrt_llm._torch.models import AutoModelForCausalLM, load_weights  # noqa: E402


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("oracle")
    return str(path), write_oracle_checkpoint(path)


class Recorder(TorchDispatchMode):
    """Logs operators with their arguments and results, and refuses host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "host read"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Run each operator again and put what comes into the tensors of the recording."""
        for func, args, kwargs, out in self.calls:
            fresh = func(*args, **kwargs)
            pairs = zip(fresh, out, strict=True) if isinstance(out, tuple | list) else [(fresh, out)]
            for new, old in pairs:
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def test_a_recording_of_a_decode_step_follows_the_static_buffers(oracle: tuple[str, dict[str, Any]]) -> None:
    path, config = oracle
    runner = ModelRunner(path, max_num_tokens=64, moe_max_num_tokens=2)
    graph = runner.metadata.create_cuda_graph_metadata(3)
    assert graph.is_cuda_graph
    assert graph.create_cuda_graph_metadata(3) is graph
    sequences = {0: [5, 6, 7], 1: list(range(20)), 2: [1]}
    tokens = runner.step(sequences).argmax(-1).tolist()
    ids, positions, recorder, logits = (
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(1, 3, dtype=torch.int32),
        None,
        None,
    )
    for _ in range(12):
        for key, token in enumerate(tokens):
            sequences[key].append(token)
        step_ids, step_positions = runner.prepare({}, dict(enumerate(tokens)), graph)
        ids.copy_(step_ids)
        positions.copy_(step_positions)
        with torch.inference_mode():
            if recorder is None:
                with Recorder() as recorder:
                    logits = runner.forward(ids, positions, metadata=graph)
            else:
                recorder.replay()
        assert logits is not None
        tokens = logits.argmax(-1).tolist()
        assert tokens == [expected_next_token(sequences[key], config) for key in range(3)]


@pytest.mark.parametrize("make", [tiny_qwen3_moe, tiny_mixtral, tiny_deepseek_v3])
@pytest.mark.parametrize("backend", ["CUTLASS", "TRTLLM", "VANILLA"])
def test_a_real_model_records_without_a_host_read(make: Any, backend: str, tmp_path: Path) -> None:
    path, sequence = make(tmp_path), list(range(10, 30))
    runner = ModelRunner(path, moe_backend=backend)
    graph = runner.metadata.create_cuda_graph_metadata(2)
    runner.step({0: sequence[:6], 1: sequence[3:9]})
    ids, positions = runner.prepare({}, {0: sequence[6], 1: sequence[9]}, graph)
    with torch.inference_mode(), Recorder() as recorder:
        logits = runner.forward(ids, positions, metadata=graph)
    torch.testing.assert_close(logits[0], hf_logits(path, sequence[:7])[-1], rtol=2e-4, atol=2e-4)
    later = runner.prepare({}, {0: sequence[7], 1: sequence[10]}, graph)
    ids.copy_(later[0])
    positions.copy_(later[1])
    with torch.inference_mode():
        recorder.replay()
    torch.testing.assert_close(logits[1], hf_logits(path, sequence[3:11])[-1], rtol=2e-4, atol=2e-4)


def test_static_tensors_keep_their_addresses(oracle: tuple[str, dict[str, Any]]) -> None:
    runner = ModelRunner(oracle[0])
    graph = runner.metadata.create_cuda_graph_metadata(2)
    runner.step({0: [1, 2], 1: [3]})
    runner.prepare({}, {0: 4, 1: 5}, graph)
    step = graph.step_tensors
    before = [
        step.slots.data_ptr(),
        step.block_tables.data_ptr(),
        step.kv_lens.data_ptr(),
        step.host_kv_lens.data_ptr(),
    ]
    assert step.kv_lens.tolist() == [3, 2]
    runner.prepare({}, {0: 4, 1: 5}, graph)
    assert graph.step_tensors is step
    assert step.kv_lens.tolist() == [4, 3]
    assert before == [
        step.slots.data_ptr(),
        step.block_tables.data_ptr(),
        step.kv_lens.data_ptr(),
        step.host_kv_lens.data_ptr(),
    ]
    with pytest.raises(ValueError, match="does not fit the graph buffers"):
        runner.prepare({}, {0: 4}, graph)


def test_metadata_counts_its_rows(oracle: tuple[str, dict[str, Any]]) -> None:
    runner = ModelRunner(oracle[0])
    runner.step({0: [1, 2]})
    runner.prepare({1: [3, 4, 5]}, {0: 6})
    data = runner.metadata
    assert (data.num_seqs, data.num_contexts, data.num_generations) == (2, 1, 1)
    assert (data.num_ctx_tokens, data.num_tokens) == (3, 4)
    assert data.step_tensors.last_tokens.tolist() == [2, 3]
    assert data.seq_lens_cuda.tolist() == [3, 1]


@pytest.mark.parametrize("fault", ["lengths", "draft tokens", "blocks", "no cache"])
def test_metadata_that_does_not_fit_together_is_refused(
    oracle: tuple[str, dict[str, Any]], fault: str
) -> None:
    runner = ModelRunner(oracle[0])
    runner.step({0: [1, 2]})
    runner.prepare({}, {0: 3})
    data: AttentionMetadata = runner.metadata
    if fault == "lengths":
        data.request_ids = [0, 1]
    elif fault == "draft tokens":
        data.seq_lens = torch.tensor([2], dtype=torch.int32)
    elif fault == "blocks":
        runner.cache.blocks[0] = []
    else:
        data.kv_cache_manager = None
    with pytest.raises(ValueError, match=r"differ|draft|needs|without"):
        data.prepare()


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (tiny_qwen3_moe, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    (tiny_qwen3_moe, {"mlp_only_layers": [1]}, "mlp_only_layers"),
    (tiny_qwen3_moe, {"use_sliding_window": True}, "use_sliding_window"),
    (tiny_qwen3_moe, {"hidden_act": "gelu"}, "hidden_act"),
    (tiny_qwen3_moe, {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    (tiny_qwen3_moe, {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*MixtralForCausalLM"),
    (tiny_qwen3_moe, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    (tiny_mixtral, {"sliding_window": 64}, "sliding_window"),
    (tiny_deepseek_v3, {"norm_topk_prob": False}, "norm_topk_prob"),
    (tiny_deepseek_v3, {"moe_layer_freq": 2}, "moe_layer_freq"),
    (tiny_deepseek_v3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
]


@pytest.mark.parametrize(("make", "change", "message"), REFUSED)
def test_a_checkpoint_that_can_not_be_run_is_refused(
    make: Any, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = Path(make(tmp_path, num_hidden_layers=1))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(ModelConfig.from_pretrained(path))


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="safetensors"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "lacking.*model.norm.weight"),
        ({"model.extra": torch.zeros(1)}, "unknown.*model.extra"),
        ({"model.norm.weight": torch.zeros(3)}, "shape"),
        ({"model.layers.0.mlp.experts.3.up_proj.weight": None}, "lacking"),
        ({"model.layers.9.anything": torch.zeros(1)}, None),
    ],
)
def test_weights_must_fit_the_model(change: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    path = tiny_qwen3_moe(tmp_path)
    model = AutoModelForCausalLM.from_config(ModelConfig.from_pretrained(path))
    weights = {name: value for name, value in {**load_weights(path), **change}.items() if value is not None}
    if message is None:
        model.load_weights(weights)
        return
    with pytest.raises(ValueError, match=message):
        model.load_weights(weights)


def test_a_split_checkpoint_with_a_lost_file_is_refused(tmp_path: Path) -> None:
    path = Path(tiny_qwen3_moe(tmp_path, max_shard_size="40KB"))
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 2
    whole = load_weights(path)
    assert "lm_head.weight" in whole
    files[1].unlink()
    with pytest.raises(ValueError, match=files[1].name):
        load_weights(path)


def test_the_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    path = tiny_qwen3_moe(tmp_path, num_hidden_layers=1)
    config = json.loads((Path(path) / "config.json").read_text())
    (Path(path) / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert ModelConfig.from_pretrained(path, dtype="bfloat16").kv_cache_spec() == (1, 2, 8, torch.bfloat16)
    assert ModelConfig.from_pretrained(path, dtype="float32").torch_dtype == torch.float32
    runner = ModelRunner(path, dtype="bfloat16")
    close = torch.nn.functional.cosine_similarity(
        runner.step({0: [4, 5, 6]})[0], hf_logits(path, [4, 5, 6])[-1], dim=0
    )
    assert close > 0.99
    with pytest.raises(ValueError, match="int8"):
        ModelConfig.from_pretrained(path, dtype="int8")


def test_attention_backends_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="FLASHINFER"):
        get_attention_backend("FLASHINFER")


def test_the_engine_can_be_imported_anew() -> None:
    import subprocess
    import sys

    script = """
import torch, trtllm_r3.standin as standin
for _ in range(2):
    standin.install()
    from tensorrt_llm._torch.modules.fused_moe.routing import RenormalizeMoeRoutingMethod
    print(RenormalizeMoeRoutingMethod(1).apply(torch.eye(3))[0].flatten().tolist())
    standin.uninstall()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1, 2]\n" * 2, done.stderr
