"""`trtllm-r3 demo`: right rows pass, wrong rows fail, and what it makes is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from trtllm_r3.cli import demo, demo_model
from trtllm_r3.cli.reference import Comparison, Reference
from trtllm_r3.cli.store import RunFolder
from trtllm_r3.flow.routes import Gap, Routes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return demo_model.build_checkpoint(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(scope="module")
def reference(checkpoint: str) -> Reference:
    return Reference(Path(checkpoint))


def test_the_checkpoint_is_whole_and_the_same_each_time(checkpoint, tmp_path):
    from safetensors.torch import load_file

    again = demo_model.build_checkpoint(tmp_path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (Path(again) / name).read_text() == (Path(checkpoint) / name).read_text()
    one, other = (load_file(Path(p) / "model.safetensors") for p in (again, checkpoint))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_prompts_are_real_sentences_with_shared_beginnings(checkpoint, tmp_path):
    from transformers import AutoTokenizer

    demo_model.write_prompts(tmp_path / "p.jsonl", 64, checkpoint)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(lines) == 64
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    lengths = [len(tokenizer.encode(line["prompt"])) for line in lines]
    assert max(lengths) + 40 < 512
    assert sum(n > 128 for n in lengths) > 10, "longer than a step of the demo: prefill in chunks"
    for group in range(0, 64, 8):
        prompts = [line["prompt"] for line in lines[group : group + 8]]
        assert len(set(prompts)) > 4
        assert all(p.startswith(prompts[0][:40]) for p in prompts)
    assert all(tokenizer.encode(s) == [tokenizer.encode(s)[0]] for s in lines[2]["stop"])


def rollouts(path: Path, answers: list[tuple[list[int], Routes]]) -> Path:
    folder = RunFolder(path, {})
    for line, (tokens, routes) in enumerate(answers, 1):
        record = {
            "prompt_token_ids": tokens[:5],
            "token_ids": tokens[5:],
            "finish_reason": "length",
            "stop_reason": None,
        }
        folder.add(line, "x", [(record, routes)])
    folder.flush()
    folder.close()
    return path


def routed(reference: Reference, tokens: list[int], **more: Any) -> Routes:
    ids = reference.router_logits(tokens[:-1]).topk(4, -1).indices.to(torch.int16)
    return Routes(ids, 0, (0, 1, 2, 3), 16, **more)


TOKENS = [list(range(30, 50)), list(range(90, 120))]


def test_right_rows_pass(reference, tmp_path):
    found = demo.check(rollouts(tmp_path, [(t, routed(reference, t)) for t in TOKENS]), reference)
    assert found.problems(set()) == []
    assert (found.answers, found.comparison.rows, found.row_bytes) == (2, 48, 32)


def test_one_wrong_id_fails(reference, tmp_path):
    routes = routed(reference, TOKENS[0])
    routes.ids[7, 2, 1] = next(e for e in range(16) if e not in routes.ids[7, 2].tolist())
    found = demo.check(rollouts(tmp_path, [(TOKENS[0], routes)]), reference)
    assert found.problems(set()) == ["1 (row, layer) pairs differ and are no tie"]


def test_a_row_too_few_fails(reference, tmp_path):
    short = routed(reference, TOKENS[0])
    found = demo.check(rollouts(tmp_path, [([*TOKENS[0], 1], short)]), reference)
    assert "line 1 has 19 rows for 21 tokens" in found.problems(set())


def test_missing_rows_fail_unless_their_cause_is_expected(reference, tmp_path):
    routes = routed(reference, TOKENS[0], gaps=(Gap(0, 3, "prefix"),))
    routes.ids[:3] = -1
    found = demo.check(rollouts(tmp_path, [(TOKENS[0], routes)]), reference)
    assert found.problems({"prefix"}) == []
    assert found.problems(set()) == ["3 rows missing: prefix"]


def test_a_missing_row_that_no_gap_tells_of_fails(reference, tmp_path):
    routes = routed(reference, TOKENS[0])
    routes.ids[4, 1] = -1
    found = demo.check(rollouts(tmp_path, [(TOKENS[0], routes)]), reference)
    assert found.problems({"prefix"}) == ["line 1: gaps and missing rows are not the same"]


def test_an_answer_without_routes_fails(reference, tmp_path):
    found = demo.check(
        rollouts(tmp_path, [(TOKENS[0], Routes(None, why_none="worker not armed"))]), reference
    )
    assert "line 1 has no routes: worker not armed" in found.problems({"prefix"})


def test_too_many_ties_fail():
    few = demo.Checked(Comparison(rows=1000, places=4000, num_ties=4))
    many = demo.Checked(Comparison(rows=1000, places=4000, num_ties=5))
    assert few.problems(set()) == []
    assert many.problems(set()) == ["5 ties, more than 0.1 %"]


def run_demo(*options: str) -> Any:
    from trtllm_r3.cli.app import app

    return CliRunner().invoke(app, ["demo", *options])


def test_the_whole_demo(standin, tmp_path, monkeypatch):
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    result = run_demo("--prompts", "24", "--out", str(tmp_path / "demo"))
    assert result.exit_code == 0, result.output
    assert "every captured row is the one that transformers routes" in result.output
    assert "rows that differ" in result.output
    assert {p.name for p in (tmp_path / "demo").iterdir()} == {
        "model",
        "prompts.jsonl",
        "rollouts",
        "rollouts-reuse",
    }


def test_the_demo_fails_if_the_rows_are_those_of_the_neighbours(standin, tmp_path, monkeypatch):
    from trtllm_r3.cli import rollout

    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    real = rollout.routes_of

    def shifted(output: Any) -> Routes:
        routes = real(output)
        return Routes(routes.ids.roll(1, 0), 0, routes.moe_layer_ids, routes.num_experts, routes.gaps)

    monkeypatch.setattr(rollout, "routes_of", shifted)
    result = run_demo("--prompts", "8")
    assert result.exit_code == 1
    assert "differ and are no tie" in result.output


def test_a_folder_with_something_in_it_is_left_alone(standin, tmp_path):
    (tmp_path / "mine").write_text("x")
    result = run_demo("--out", str(tmp_path))
    assert result.exit_code == 2
    assert "empty" in result.stderr
