"""`trtllm-r3 rollout` as users run it: an own process with a worker, killed, interrupted, taken up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_oracle_checkpoint
from support.oracle import expected_continuation, expected_ids

from trtllm_r3.cli.shards import read_rollouts

COUNT = 60


@pytest.fixture
def job(tmp_path: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """Folder, the oracle's configuration, and a command that takes some seconds."""
    config = write_oracle_checkpoint(tmp_path / "model")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, 5 + i % 30).tolist() for i in range(COUNT)]
    lines = [json.dumps({"prompt_token_ids": p, "end_id": -1}) for p in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    where = [
        f"--{name}={tmp_path / file}" for name, file in (("model", "model"), ("prompts", "prompts.jsonl"))
    ]
    options = [
        "--max-tokens=40",
        "--in-flight=4",
        "--shard-prompts=2",
        "--max-batch-size=4",
        "--kv-tokens=1024",
    ]
    options += ["--max-num-tokens=64", "--max-seq-len=128"]
    command = [
        sys.executable,
        "-m",
        "trtllm_r3.cli",
        "rollout",
        *where,
        f"--out={tmp_path / 'out'}",
        *options,
    ]
    return tmp_path, config, command


def lines_of(folder: Path) -> int:
    file = folder / "out" / "rollouts.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def start_until(folder: Path, command: Sequence[str], lines: int) -> subprocess.Popen[str]:
    """Start it in a session of its own, and come back when it has written some lines."""
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while lines_of(folder) < lines and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert running.poll() is None, running.communicate()
    assert lines_of(folder) >= lines
    return running


def check_all(folder: Path, config: dict[str, Any]) -> None:
    found = list(read_rollouts(folder / "out"))
    assert sorted(record["line"] for record, _ in found) == list(range(1, COUNT + 1))
    for record, ids in found:
        prompt, answer = record["prompt_token_ids"], record["token_ids"]
        assert answer == expected_continuation(prompt, 40, config)
        assert ids is not None
        assert np.array_equal(ids.numpy(), expected_ids([*prompt, *answer][:-1], None, None, config))
        assert record["routes"]["missing"] == 0


def test_a_killed_run_is_taken_up_where_it_was(job):
    folder, config, command = job
    running = start_until(folder, command, 8)
    running.kill()
    running.communicate()
    before = (folder / "out" / "rollouts.jsonl").read_bytes()
    assert before.count(b"\n") < COUNT
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (folder / "out" / "rollouts.jsonl").read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    check_all(folder, config)
    assert "the stand-in engine" in ran.stderr


@pytest.mark.parametrize("how", ["terminal", "batch system"])
def test_an_interrupt_keeps_what_is_finished_and_ends_soon(job, how):
    """Ctrl-C reaches the worker as well; a batch system's SIGTERM reaches the command alone."""
    folder, _, command = job
    running = start_until(folder, command, 4)
    if how == "terminal":
        os.killpg(running.pid, signal.SIGINT)
    else:
        running.terminate()
    _, told = running.communicate(timeout=60)
    assert running.returncode == 130, told
    assert "the same command goes on from there" in told
    assert 4 <= lines_of(folder) < COUNT
    assert sum(1 for _ in read_rollouts(folder / "out")) == lines_of(folder)
