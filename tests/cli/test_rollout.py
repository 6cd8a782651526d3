"""`trtllm-r3 rollout`: what is on disk is whole and said once, whatever happens on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from trtllm_r3.cli import engine, shards, store
from trtllm_r3.cli.rollout import derived_seed

from .conftest import EXPERTS, LAYERS, TOP_K, FakeLLM, expected_routes

PROMPTS = [{"prompt": f"number {i}", "id": f"p{i}"} for i in range(23)]


def records(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]


def errors(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]


def check_whole(tmp_path: Path, lines: list[int], answers: int = 1) -> None:
    """Each line is there once, and its routes are those of its tokens."""
    found = records(tmp_path)
    assert sorted((r["line"], r["answer"]) for r in found) == [(n, a) for n in lines for a in range(answers)]
    for record in found:
        where, tokens = record["routes"], [*record["prompt_token_ids"], *record["token_ids"]]
        with safe_open(tmp_path / "out" / where["file"], "pt") as shard:
            ids = shard.get_tensor(where["key"])
        assert torch.equal(ids[1:], expected_routes(tokens)[1:])
        assert (ids[0] == -1).all()
    used = {r["routes"]["file"] for r in found}
    assert {p.name for p in (tmp_path / "out").glob("routes-*")} == used


def test_everything_is_on_disk_and_reads_with_json_and_safetensors_alone(llm, rollout, tmp_path):
    result = rollout(PROMPTS, "--shard-prompts", "5", "--temperature", "0.7", "--max-tokens", "9")
    assert result.exit_code == 0, result.output
    check_whole(tmp_path, list(range(1, 24)))
    record = min(records(tmp_path), key=lambda r: r["line"])
    assert {k: record[k] for k in ("line", "id", "prompt", "text", "finish_reason", "stop_reason")} == {
        "line": 1, "id": "p0", "prompt": "number 0",
        "text": "\u2028é", "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    where = record["routes"]
    assert (where["rows"], where["start"], where["missing"], where["gaps"]) == (10, 0, 1, [[0, 1, "prefix"]])
    assert where["versions"] == [[0, 10, 0]]
    with safe_open(tmp_path / "out" / where["file"], "np") as shard:
        meta, tensor = shard.metadata(), shard.get_tensor(where["key"])
    assert (meta["format"], meta["format_version"], meta["dtype"]) == ("trtllm-r3-routes", "1", "int16")
    assert (json.loads(meta["moe_layer_ids"]), meta["num_experts"], meta["top_k"]) == ([1, 2, 4], "300", "2")
    entry = json.loads(meta["entries"])[where["key"]]
    assert entry == {"shape": [10, 3, 2], "start": 0, "gaps": [[0, 1, "prefix"]], "versions": [[0, 10, 0]]}
    assert tensor.dtype.name == "int16"
    assert tensor.shape == (10, LAYERS, TOP_K)
    assert tensor.max() < EXPERTS
    assert llm.shut_down


def test_bad_lines_are_named_and_the_others_run(llm, rollout, tmp_path):
    lines = [PROMPTS[0], "{", {"prompt": "x" * 101, "id": "long"}, PROMPTS[1], {"prompt": "a", "n": 2}]
    result = rollout(lines)
    assert result.exit_code == 1
    check_whole(tmp_path, [1, 4])
    assert [(e["line"], e["id"]) for e in errors(tmp_path)] == [(2, None), (3, "long"), (5, None)]
    assert "line 2: not JSON" in result.stderr
    assert "line 3: prompt of 101 tokens exceeds max_num_tokens" in result.stderr
    assert "n=2 gives the same answer each time" in errors(tmp_path)[2]["error"]


def test_a_request_that_fails_in_the_engine_is_a_bad_line(llm, rollout, tmp_path):
    from tensorrt_llm.llmapi import RequestError

    def fail(request: Any) -> None:
        if len(request.prompt_token_ids) == 9:
            raise RequestError("no room")

    llm.on_end = fail
    assert rollout(PROMPTS[8:12]).exit_code == 1
    check_whole(tmp_path, [1, 2])
    assert sorted(e["line"] for e in errors(tmp_path)) == [3, 4]
    llm.on_end = lambda request: None
    assert rollout(PROMPTS[8:12]).exit_code == 0
    check_whole(tmp_path, [1, 2, 3, 4])
    assert errors(tmp_path) == []


def test_an_engine_in_this_process_refuses_at_once_and_the_others_run(llm, rollout, tmp_path):
    from tensorrt_llm.llmapi import RequestError

    def refuse(inputs: Any, params: Any) -> Any:
        if inputs == "number 1":
            raise RequestError("no room for output")
        return FakeLLM.generate_async(llm, inputs, params)

    llm.generate_async = refuse
    assert rollout(PROMPTS[:3]).exit_code == 1
    check_whole(tmp_path, [1, 3])
    assert [(e["line"], e["error"]) for e in errors(tmp_path)] == [(2, "no room for output")]


def test_a_finished_run_does_nothing_more_and_new_prompts_are_added(llm, rollout, tmp_path):
    assert rollout(PROMPTS[:10]).exit_code == 0
    before = records(tmp_path)
    assert rollout(PROMPTS[:10]).exit_code == 0
    assert records(tmp_path) == before
    assert llm.asked == 10
    assert rollout(PROMPTS).exit_code == 0
    assert llm.asked == 23
    check_whole(tmp_path, list(range(1, 24)))


@pytest.mark.parametrize(
    "ending", [RuntimeError("the worker is gone"), KeyboardInterrupt()], ids=["death", "ctrl-c"]
)
def test_what_is_finished_when_the_run_ends_early_is_kept_and_not_repeated(llm, rollout, tmp_path, ending):
    ended = []

    def end(request: Any) -> None:
        ended.append(request)
        if len(ended) == 9:
            raise ending

    llm.on_end = end
    result = rollout(PROMPTS, "--in-flight", "4", "--shard-prompts", "3")
    assert result.exit_code == (130 if isinstance(ending, KeyboardInterrupt) else 1)
    assert "goes on from there" in result.stderr
    kept = len(records(tmp_path))
    assert 8 <= kept < 12  # those of the four in flight that ended in the same moment
    check_whole(tmp_path, sorted(r["line"] for r in records(tmp_path)))
    llm.on_end, llm.asked = lambda request: None, 0
    assert rollout(PROMPTS).exit_code == 0
    assert llm.asked == 23 - kept
    check_whole(tmp_path, list(range(1, 24)))


@pytest.mark.parametrize("step", ["write_shard", "append_lines"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_point_of_writing_neither_loses_nor_repeats(
    llm, rollout, tmp_path, monkeypatch, step, when
):
    """The second shard is the one that does not get through, and nothing is written after it."""
    real, calls = getattr(shards, step), []

    def crash(*args: Any) -> Any:
        calls.append(args)
        if len(calls) < 2 or (when == "after" and len(calls) == 2):
            outcome = real(*args)
        if len(calls) >= 2:
            raise MemoryError("as if the power went")
        return outcome

    monkeypatch.setattr(store, step, crash)
    result = rollout(PROMPTS, "--shard-prompts", "4")
    assert isinstance(result.exception, MemoryError) or result.exit_code == 1
    monkeypatch.setattr(store, step, real)
    if (step, when) == ("append_lines", "after"):
        done = 8
    else:
        done = 4
    assert len(records(tmp_path)) == done
    llm.asked = 0
    assert rollout(PROMPTS).exit_code == 0
    assert llm.asked == 23 - done
    check_whole(tmp_path, list(range(1, 24)))


@pytest.mark.parametrize("cut", [1, 30, "\n"])
def test_a_torn_last_line_is_done_again(llm, rollout, tmp_path, cut):
    """Also where only the first of a prompt's two answers got to the disk."""
    options = ["--n", "2", "--temperature", "1", "--shard-prompts", "4"]
    assert rollout(PROMPTS[:9], *options).exit_code == 0
    file = tmp_path / "out" / "rollouts.jsonl"
    data = file.read_bytes()
    file.write_bytes(data[: data.rindex(b"\n", 0, -1) + 1] if cut == "\n" else data[:-cut])
    llm.asked = 0
    assert rollout(PROMPTS[:9], *options).exit_code == 0
    assert llm.asked == 2  # its two answers
    check_whole(tmp_path, list(range(1, 10)), answers=2)


def test_a_folder_of_another_run_is_refused_by_what_differs(llm, rollout, model, tmp_path):
    assert rollout(PROMPTS[:3]).exit_code == 0
    for options, name in [(("--temperature", "0.5"), "sampling"), (("--seed", "1"), "seed")]:
        result = rollout(PROMPTS[:3], *options)
        assert result.exit_code == 2
        assert f"({name} was" in result.stderr
        assert "another --out" in result.stderr
    (model / "model.safetensors").write_bytes(b"other weights")
    result = rollout(PROMPTS[:3])
    assert result.exit_code == 2
    assert "(model was" in result.stderr
    assert llm.asked == 3


def test_a_prompt_that_changed_after_it_was_run_is_refused(llm, rollout, tmp_path):
    assert rollout(PROMPTS[:3]).exit_code == 0
    result = rollout([PROMPTS[0], {"prompt": "another"}, PROMPTS[2]])
    assert result.exit_code == 2
    assert "line 2" in result.stderr
    check_whole(tmp_path, [1, 2, 3])


def test_speed_options_may_change_between_runs(llm, rollout, tmp_path):
    assert rollout(PROMPTS[:3], "--max-batch-size", "8").exit_code == 0
    assert rollout(PROMPTS[:5], "--max-batch-size", "2", "--no-overlap").exit_code == 0
    check_whole(tmp_path, [1, 2, 3, 4, 5])


def test_damage_in_the_middle_is_refused_and_left_as_it_is(llm, rollout, tmp_path):
    assert rollout(PROMPTS[:3]).exit_code == 0
    file = tmp_path / "out" / "rollouts.jsonl"
    damaged = file.read_bytes().replace(b'{"line"', b'{line"', 1)
    file.write_bytes(damaged)
    result = rollout(PROMPTS[:3])
    assert result.exit_code == 2
    assert "line 1 is damaged" in result.stderr
    assert file.read_bytes() == damaged


def test_a_shard_that_is_gone_is_refused(llm, rollout, tmp_path):
    assert rollout(PROMPTS[:3]).exit_code == 0
    (tmp_path / "out" / "routes-00000.safetensors").unlink()
    result = rollout(PROMPTS[:5])
    assert result.exit_code == 2
    assert "routes-00000.safetensors is gone" in result.stderr


def test_two_runs_in_one_folder_at_once_are_refused(llm, rollout, tmp_path):
    def look(request: Any) -> None:
        if "inner" not in seen:
            seen["inner"] = None
            seen["inner"] = rollout(PROMPTS[:3])

    seen: dict[str, Any] = {}
    llm.on_end = look
    assert rollout(PROMPTS[:3]).exit_code == 0
    assert seen["inner"].exit_code == 2
    assert "another process" in seen["inner"].stderr


def test_no_more_prompts_are_in_flight_than_asked(llm, rollout):
    open_now, most = [0], [0]

    def started(inputs: Any, params: Any) -> Any:
        open_now[0] += 1
        most[0] = max(most[0], open_now[0])
        return FakeLLM.generate_async(llm, inputs, params)

    llm.generate_async = started
    llm.on_end = lambda request: open_now.__setitem__(0, open_now[0] - 1)
    assert rollout(PROMPTS, "--in-flight", "3").exit_code == 0
    assert most[0] == 3


def test_an_answer_without_routes_is_kept_and_says_why(llm, rollout, tmp_path):
    llm.routes = False
    assert rollout(PROMPTS[:1]).exit_code == 0
    [record] = records(tmp_path)
    assert record["routes"]["file"] is None
    assert record["routes"]["why_none"] == "stopped in text"
    assert list((tmp_path / "out").glob("routes-*")) == []


def test_each_prompt_has_a_seed_of_its_own_that_no_run_changes(llm, rollout, tmp_path):
    assert rollout([*PROMPTS[:4], {"prompt": "mine", "seed": 5}], "--seed", "3").exit_code == 0
    seeds = {r["line"]: r["token_ids"][0] for r in records(tmp_path)}
    assert [seeds[n] for n in range(1, 5)] == [derived_seed(3, n) % 97 for n in range(1, 5)]
    assert seeds[5] == 5
    assert len({derived_seed(s, n) for s in range(3) for n in range(100)}) == 300


@pytest.mark.parametrize(
    "options",
    [("--n", "0"), ("--top-p", "2"), ("--engine-option", "x"), ("--no-such-option",), ("--n", "2")],
)
def test_wrong_options_exit_with_2_before_anything_is_built(llm, rollout, options, monkeypatch):
    monkeypatch.setattr(engine, "build", lambda *args: pytest.fail("built"))
    assert rollout(PROMPTS[:1], *options).exit_code == 2


def test_a_file_where_the_folder_should_be_is_refused_and_left_as_it_is(llm, rollout, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "build", lambda *args: pytest.fail("built"))
    (tmp_path / "out").write_text("mine")
    result = rollout(PROMPTS[:1])
    assert result.exit_code == 2
    assert "is a file" in " ".join(result.stderr.replace("│", " ").split())
    assert (tmp_path / "out").read_text() == "mine"


def test_an_engine_that_cannot_be_built_says_the_whole_reason(llm, rollout, monkeypatch):
    def refuse(options: Any) -> Any:
        raise RuntimeError("Executor worker returned error") from ValueError(
            "layer 3 routes inside its kernel"
        )

    monkeypatch.setattr(engine, "build", refuse)
    result = rollout(PROMPTS[:1])
    assert result.exit_code == 2
    assert "layer 3 routes inside its kernel" in result.stderr


def test_the_stand_in_is_built_small_unless_told_otherwise(standin):
    plain = engine._arguments(engine._completed(engine.EngineOptions(model="m")))
    assert (plain["max_batch_size"], plain["max_num_tokens"], plain["enable_chunked_prefill"]) == (
        16,
        1024,
        True,
    )
    assert plain["cuda_graph_config"].max_batch_size == 16
    assert plain["kv_cache_config"].enable_block_reuse is True
    assert plain["kv_cache_config"].enable_partial_reuse is False
    options = engine.EngineOptions(
        model="m", max_batch_size=4, cuda_graphs=False, overlap=False, block_reuse=True, kv_tokens=64,
        moe_backend="VANILLA", moe_max_num_tokens=8, extra={"stream_interval": 2},
    )  # fmt: skip
    given = engine._arguments(engine._completed(options))
    assert (given["max_batch_size"], given["disable_overlap_scheduler"], given["stream_interval"]) == (
        4,
        True,
        2,
    )
    assert given["cuda_graph_config"] is None
    assert (given["kv_cache_config"].enable_block_reuse, given["kv_cache_config"].max_tokens) == (True, 64)
    assert (given["moe_config"].backend, given["moe_config"].max_num_tokens) == ("VANILLA", 8)


def test_it_says_which_engine_runs(llm, rollout, monkeypatch):
    assert "the stand-in engine" in rollout(PROMPTS[:1]).stderr
    monkeypatch.setattr(engine, "choose", lambda: engine.Engine("TensorRT-LLM", "1.2.0"))
    result = rollout(PROMPTS[:1])
    assert "TensorRT-LLM 1.2.0 has not passed `selftest`" in result.stderr
    assert result.exit_code == 2


def test_a_flush_that_was_cut_short_and_is_tried_again_repeats_no_line(tmp_path, monkeypatch):
    import os

    from trtllm_r3.cli import shards
    from trtllm_r3.flow.routes import Routes

    folder = store.RunFolder(tmp_path, {"model": "m"})
    folder.add(1, "d", [({"prompt": "a"}, Routes(None, why_none="x"))])
    real, calls = shards.sync, []

    def interrupted(file):
        real(file)
        calls.append(os.fstat(file.fileno()).st_size)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(shards, "sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.flush()
    folder.flush()
    folder.close()
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in lines] == [1]


def test_each_answer_is_a_request_of_its_own_with_a_seed_of_its_own(rollout, tmp_path, llm):
    assert rollout([{"prompt": "a b", "n": 3}], "--temperature", "1").exit_code == 0
    assert llm.asked == 3
    assert [(r["answer"], r["answers"]) for r in records(tmp_path)] == [(0, 3), (1, 3), (2, 3)]
    assert len({derived_seed(5, 1, answer) for answer in range(3)}) == 3


def test_a_folder_without_answers_may_be_made_with_other_options(rollout, tmp_path, llm):
    assert rollout([{"prompt": 3}], "--temperature", "1").exit_code == 1
    assert rollout([{"prompt": "a b"}], "--temperature", "2").exit_code == 0
    assert len(records(tmp_path)) == 1
