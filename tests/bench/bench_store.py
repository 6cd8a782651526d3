"""Commit and assembly of rows, beside one dictionary entry and one clone for each row.

    python tests/bench/bench_store.py

"commit" is all of the host work of a step after its rows have landed; "step" adds what the CPU stand-in
does in place of the device: freeze, poison, snapshot, copy. Best of several runs, in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from trtllm_r3.flow.recorder import RouteRecorder, Track

LAYERS, TOP_K, EXPERTS = 48, 8, 128
TARGETS = {256: 0.1, 8192: 3.0}
ASSEMBLY_TARGET, RATIO_TARGET = 2.0, 8.0


class Line(NamedTuple):
    """One row of the table; times in ms."""

    what: str
    step: float | None
    ours: float
    pattern: float
    target: float | None

    def __str__(self) -> str:
        step = "" if self.step is None else f"{self.step:.3f}"
        target = "" if self.target is None else f"<= {self.target:g}"
        ratio = self.pattern / self.ours
        missed = self.target is not None and self.ours > self.target
        verdict = "MISSED" if missed else "ok" if self.target else ""
        numbers = f"{self.ours:10.3f} | {target:>7} | {self.pattern:12.3f} | {ratio:6.1f}x | {verdict:<6}"
        return f"| {self.what:<28} | {step:>8} | {numbers} |"


def best(run: Callable[[], float], repeats: int = 9) -> float:
    """The fastest of several runs, each of which returns its own time in ms."""
    run()
    return min(run() for _ in range(repeats))


def clocked(work: Callable[[], object]) -> float:
    """Milliseconds that `work` took."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def rows_of(rows: int) -> torch.Tensor:
    """uint8 [N, L, K], distinct within a row."""
    first = torch.randint(0, EXPERTS - TOP_K, (rows, LAYERS, 1))
    return (first + torch.arange(TOP_K)).to(torch.uint8)


def recorder_with(requests: int, rows: int) -> tuple[RouteRecorder, list[Track]]:
    """A recorder whose buffer holds `rows` good rows at every step."""
    recorder = RouteRecorder(
        moe_layer_ids=range(LAYERS),
        top_k=TOP_K,
        num_experts=EXPERTS,
        max_rows=rows,
        device=torch.device("cpu"),
    )
    return recorder, [recorder.open(start=0, position=0) for _ in range(requests)]


def step(requests: int, each: int) -> tuple[float, float]:
    """(whole step, commit alone) of `requests` spans of `each` rows, always at positions not seen before.

    Requests end at 1,024 tokens (8,192 if they prefill more) and others follow: pages come and go too.
    """
    rows = requests * each
    recorder, tracks = recorder_with(requests, rows)
    good, position, commits = rows_of(rows), 0, []
    commit = recorder._commit
    recorder._commit = lambda ticket: commits.append(clocked(lambda: commit(ticket)))

    def run() -> float:
        nonlocal position, tracks
        if position + each > max(1024, each):
            for track in tracks:
                recorder.release(track)
            tracks = [recorder.open(start=0, position=0) for _ in tracks]
            position = 0
        slots = [track.slot for track in tracks]
        began = time.perf_counter()
        recorder.begin_step(slots, [position] * requests, [each] * requests)
        poisoned = time.perf_counter()
        recorder.capturer.routes_RLK.copy_(good)
        written = time.perf_counter()
        recorder.end_step()
        position += each
        return (time.perf_counter() - written + poisoned - began) * 1e3

    whole = best(run, repeats=max(30, 100_000 // rows))
    assert recorder.counters["rows_missing"] == 0
    return whole, min(commits[2:])


def pattern_commit(requests: int, each: int) -> float:
    """One clone for each row, into a dictionary for each request."""
    host, store = rows_of(requests * each), {r: {} for r in range(requests)}

    def commit() -> None:
        row = 0
        for request in range(requests):
            for position in range(each):
                store[request][position] = host[row].clone()
                row += 1

    return best(lambda: clocked(commit))


def assembly(rows: int) -> tuple[float, float]:
    """(ours, pattern) of one request's rows into one tensor."""
    recorder, (track,) = recorder_with(1, rows)
    good = rows_of(rows)
    recorder.begin_step([track.slot], [0], [rows])
    recorder.capturer.routes_RLK.copy_(good)
    recorder.end_step()
    finish = {"num_tokens": rows + 1, "generated": 1}
    assert torch.equal(recorder.finish(track, **finish).ids, good)
    store = {position: row.clone() for position, row in enumerate(good)}
    ours = best(lambda: clocked(lambda: recorder.finish(track, **finish)))
    return ours, best(lambda: clocked(lambda: torch.stack([store[p] for p in range(rows)])))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"L={LAYERS}, K={TOP_K}, uint8; torch {torch.__version__}, numpy {np.__version__}, one thread; ms")
    print(
        "| what                         |     step |     commit |  target | row by row   |  ratio  |      |"
    )
    print(
        "|------------------------------|----------|------------|---------|--------------|---------|------|"
    )
    for what, requests, each in [
        ("decode, 64 requests", 64, 1),
        ("decode, 256 requests", 256, 1),
        ("decode, 1024 requests", 1024, 1),
        ("prefill, 1 x 256 rows", 1, 256),
        ("prefill, 4 x 256 rows", 4, 256),
        ("prefill, 8 x 1024 rows", 8, 1024),
        ("prefill, 1 x 8192 rows", 1, 8192),
    ]:
        rows = requests * each
        last = (*step(requests, each), pattern_commit(requests, each))
        print(Line(what, *last, TARGETS.get(rows)))
    ours, pattern = assembly(8192)
    print(Line("assembly of 8192 rows", None, ours, pattern, ASSEMBLY_TARGET))
    road = Line("commit and assembly of them", None, ours + last[1], pattern + last[2], None)
    ratio = road.pattern / road.ours
    verdict = "ok" if ratio >= RATIO_TARGET else "MISSED"
    print(f"{road}\n8,192 rows all the way: {ratio:.0f}x faster, target >= {RATIO_TARGET:g}x: {verdict}")


if __name__ == "__main__":
    main()
