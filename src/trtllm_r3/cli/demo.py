"""`trtllm-r3 demo`: real text through a small model, every row checked against Hugging Face transformers."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from . import engine, model_files, rollout
from .demo_model import build_checkpoint, quiet, write_prompts
from .reference import Comparison, Reference
from .shards import read_rollouts
from .store import RunFolder

__all__ = ["build_checkpoint", "run_demo"]

_TIMED_RUNS = 2
_OPTIONS: dict[str, Any] = {
    "chunked_prefill": True,
    "overlap": True,
    "cuda_graphs": True,
    "block_reuse": False,
    "max_batch_size": 16,
    "max_num_tokens": 128,
    "max_seq_len": 512,
    "kv_tokens": 16384,
}


@dataclass
class Checked:
    """One pass over all prompts: its rows beside the reference's, and what is missing."""

    comparison: Comparison = field(default_factory=Comparison)
    causes: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    faults: list[str] = field(default_factory=list)
    row_bytes: int = 0

    def problems(self, allowed: set[str]) -> list[str]:
        """What is not as it has to be, in words; `allowed`: causes of missing rows that are fine."""
        found = list(self.faults)
        if self.comparison.num_unexplained:
            found.append(f"{self.comparison.num_unexplained} (row, layer) pairs differ and are no tie")
        elif not self.comparison.good:
            found.append(f"{self.comparison.num_ties} ties, more than 0.1 %")
        if not self.comparison.rows:
            found.append("no row was captured")
        bad = {cause: n for cause, n in self.causes.items() if cause not in allowed}
        return found + [f"{n} rows missing: {cause}" for cause, n in bad.items()]


def run_demo(root: Path, count: int, console: Console) -> bool:
    """Everything, in an empty folder. Prints a table; False if a row is wrong or missing that must not be."""
    root.mkdir(parents=True, exist_ok=True)
    _one_thread()
    with quiet():
        checkpoint = build_checkpoint(root / "model")
        prompts = root / "prompts.jsonl"
        write_prompts(prompts, count, checkpoint)
        options = engine.EngineOptions(model=checkpoint, **_OPTIONS)
        console.print(f"{count} prompts of real sentences, Qwen3-MoE with 4 layers, top-4 of 16 experts")
        with _llm(options, routes=False) as plain, _llm(options) as llm:
            off, on = _compared(plain, llm, prompts)
            _roll(llm, options, prompts, root / "rollouts")
        engine.in_this_process()  # another worker would cost more time than it shows
        with _llm(replace(options, block_reuse=True)) as llm:
            _roll(llm, options, prompts, root / "rollouts-reuse")
        reference = Reference(Path(checkpoint))
        passes = [check(root / name, reference) for name in ("rollouts", "rollouts-reuse")]
    console.print(_table(passes, off.rate, on.rate))
    problems = [problem for done in passes for problem in done.problems(set())]
    if on.answers != off.answers:
        problems.append("tokens are not the same with capture on and off")
    if any(p.answers != count for p in passes):
        problems.append(f"expected {count} answers, found {[p.answers for p in passes]}")
    for problem in problems:
        console.print(f"FAILED: {problem}", style="red", soft_wrap=True)
    if not problems:
        console.print("every captured row is the one that transformers routes", style="green")
    return not problems


def _one_thread() -> None:
    """A model this small is slower on several threads; workers take the number from the environment."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@contextlib.contextmanager
def _llm(options: engine.EngineOptions, *, routes: bool = True) -> Iterator[Any]:
    llm = engine.build(options, routes=routes)
    try:
        yield llm
    finally:
        llm.shutdown()


@dataclass
class Timed:
    """A run of all prompts: tokens through the model a second, and the answers."""

    rate: float
    answers: list[list[int]]


def _compared(plain: Any, llm: Any, prompts: Path) -> tuple[Timed, Timed]:
    """The best of some runs each, in turn, since the machine may have other things to do now and then."""
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    pairs = [
        (_timed(plain, lines), _timed(llm, lines, return_routed_experts=True)) for _ in range(_TIMED_RUNS)
    ]
    off, on = (max(runs, key=lambda run: run.rate) for runs in zip(*pairs, strict=True))
    return off, on


def _timed(llm: Any, lines: Sequence[dict[str, Any]], **ask: Any) -> Timed:
    params = [
        engine.sampling_params(seed=i, **ask, **{k: v for k, v in line.items() if k not in ("id", "prompt")})
        for i, line in enumerate(lines)
    ]
    started = time.perf_counter()
    outputs = llm.generate([line["prompt"] for line in lines], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    tokens = sum(len(output.prompt_token_ids) + output.outputs[0].length for output in outputs)
    return Timed(tokens / seconds, answers)


def _roll(llm: Any, options: engine.EngineOptions, prompts: Path, out: Path) -> None:
    made_with = model_files.made_with(engine.choose(), Path(options.model), {}, 0)
    with contextlib.closing(RunFolder(out, made_with)) as folder:
        rollout.Rollout(llm, folder, {}).run(prompts, model_files.vocabulary(Path(options.model)))


def check(rollouts: Path, reference: Reference) -> Checked:
    """Read a folder of rollouts back and compare each row with the reference."""
    checked = Checked()
    for record, ids in read_rollouts(rollouts):
        checked.answers += 1
        checked.finishes[_finish(record)] += 1
        where, sequence = record["routes"], [*record["prompt_token_ids"], *record["token_ids"]]
        if ids is None:
            checked.faults.append(f"line {record['line']} has no routes: {where['why_none']}")
            continue
        if len(ids) != len(sequence) - 1 or where["start"] != 0:
            checked.faults.append(f"line {record['line']} has {len(ids)} rows for {len(sequence)} tokens")
            continue
        checked.causes.update({cause: stop - start for start, stop, cause in where["gaps"]})
        checked.row_bytes = ids[0].numel() * ids.element_size()
        found = reference.check(sequence, ids)
        if found.missing != sum(stop - start for start, stop, _ in where["gaps"]):
            checked.faults.append(f"line {record['line']}: gaps and missing rows are not the same")
        checked.comparison.add(found)
    return checked


def _finish(record: dict[str, Any]) -> str:
    if record["finish_reason"] != "stop":
        return str(record["finish_reason"])
    return {type(None): "end token", int: "stop token", str: "stop string"}[type(record["stop_reason"])]


def _table(passes: list[Checked], off: float, on: float) -> Table:
    table = Table("", "no block reuse", "block reuse", title="against transformers", title_justify="left")

    def row(name: str, *values: Any) -> None:
        table.add_row(name, *map(str, values))

    row("requests", *(p.answers for p in passes))
    row("ended by", *(", ".join(f"{k} {v}" for k, v in sorted(p.finishes.items())) for p in passes))
    row("rows captured", *(p.comparison.rows for p in passes))
    row("rows that differ", *(p.comparison.differing_rows for p in passes))
    row("  explained by a tie", *(p.comparison.num_ties for p in passes))
    row("  unexplained", *(p.comparison.num_unexplained for p in passes))
    row("missing rows", *(_missing(p) for p in passes))
    row("bytes per token", *(p.row_bytes for p in passes))
    row("tokens/s, capture off", f"{off:.0f}", "")
    row("tokens/s, capture on", f"{on:.0f} ({on / off:.2f} of off)", "")
    return table


def _missing(checked: Checked) -> str:
    causes = ", ".join(f"{cause}: {n}" for cause, n in sorted(checked.causes.items()))
    return f"{checked.comparison.missing} ({causes})" if causes else str(checked.comparison.missing)
