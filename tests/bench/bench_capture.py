"""GPU time that each way of recording the router's ids adds to one decode step in a CUDA graph.

    python tests/bench/bench_capture.py [--shape 48x8/128] [--batch 1 8 64 256 512]

One step: L layers, each a router (matmul, top-k) and a matmul. Rows of the table are medians over rounds of the paired
difference to the same graph without capture, in the same run:
  step    this package: kept ids, one stack and one checking kernel, plus the witness layer
  layer   this package, capture="layer"
  slice   one slice assignment a layer into int32 [rows, L, K] (native R3, vLLM)
  index   one index_copy_ a layer (the RFC)
  around  this package outside of the graph: poison and snapshot of the step's rows
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from trtllm_r3.flow.capturer import RouteCapturer

Step = Callable[[], None]


class Model:
    """L layers of router and matmul; `record(layer, ids, logits)` is called after each router."""

    def __init__(self, rows: int, layers: int, top_k: int, experts: int, hidden: int) -> None:
        torch.manual_seed(0)
        self.shape = rows, layers, top_k, experts
        make = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(rows, hidden, **make)
        self.gates = [torch.randn(hidden, experts, **make) / hidden**0.5 for _ in range(layers)]
        self.mixers = [torch.randn(hidden, hidden, **make) / hidden**0.5 for _ in range(layers)]

    def run(
        self,
        before: Callable[[int, torch.Tensor], None],
        after: Callable[[int, torch.Tensor, torch.Tensor], None],
    ) -> None:
        h = self.x
        for layer, (gate, mixer) in enumerate(zip(self.gates, self.mixers, strict=True)):
            logits = h @ gate
            before(layer, logits)
            ids = torch.topk(logits, self.shape[2], dim=-1).indices.to(torch.int32)
            h = h @ mixer
            after(layer, ids, logits)


def steps(model: Model) -> dict[str, Step]:
    rows, layers, top_k, experts = model.shape
    wide = torch.zeros(rows, layers, top_k, device="cuda", dtype=torch.int32)
    deep = torch.zeros(layers, rows, top_k, device="cuda", dtype=torch.int32)
    index = torch.arange(rows, device="cuda")

    def ours(mode: str) -> Step:
        capturer = RouteCapturer(
            max_rows=rows,
            layers=layers,
            top_k=top_k,
            num_experts=experts,
            device=torch.device("cuda"),
            mode=mode,
        )

        def after(layer: int, ids: torch.Tensor, logits: torch.Tensor) -> None:
            capturer.hear(ids, logits)
            capturer.leave()

        return lambda: model.run(lambda layer, logits: capturer.enter(layer, logits, rows), after)

    def plain(write: Callable[[int, torch.Tensor], object]) -> Step:
        return lambda: model.run(lambda *_: None, lambda layer, ids, _: void(write(layer, ids)))

    return {
        "none": plain(lambda *_: None),
        "step": ours("step"),
        "layer": ours("layer"),
        "slice": plain(lambda layer, ids: wide[:, layer].copy_(ids)),
        "index": plain(lambda layer, ids: deep[layer].index_copy_(0, index, ids)),
    }


def void(_: object) -> None:
    """Drop a value."""


def graph_of(step: Step) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def gpu_us(run: Step, times: int = 30) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / times


def around(model: Model) -> torch.cuda.CUDAGraph:
    rows, layers, top_k, _ = model.shape
    buffer, slot = (torch.zeros(rows, layers, top_k, device="cuda", dtype=torch.uint8) for _ in range(2))

    def step() -> None:
        buffer[:rows].fill_(0)
        slot[:rows].copy_(buffer[:rows])

    return graph_of(step)


def measure(model: Model, rounds: int) -> dict[str, float]:
    graphs = {name: graph_of(step) for name, step in steps(model).items()}
    base, added = [], {name: [] for name in graphs if name != "none"}
    for _ in range(rounds):
        base.append(gpu_us(graphs["none"].replay))
        for name in added:
            added[name].append(gpu_us(graphs[name].replay) - base[-1])
    outside = around(model)
    found = {"base": statistics.median(base), **{n: statistics.median(v) for n, v in added.items()}}
    return {**found, "around": statistics.median(gpu_us(outside.replay) for _ in range(rounds))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", nargs="+", default=["48x8/128", "58x8/256", "36x4/128", "94x8/128"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64, 256, 512])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds added to one graph replay"
    )
    print(
        f"{'shape':>10} {'batch':>5} {'base':>8} {'step':>7} {'layer':>7} {'slice':>7} {'index':>7} {'around':>7} {'slice/step':>10}"
    )
    for shape in args.shape:
        layers, rest = shape.split("x")
        top_k, experts = map(int, rest.split("/"))
        for batch in args.batch:
            found = measure(Model(batch, int(layers), top_k, experts, args.hidden), args.rounds)
            cells = " ".join(f"{found[n]:7.1f}" for n in ("step", "layer", "slice", "index", "around"))
            ratio = found["slice"] / max(found["step"], 0.1)
            print(f"{shape:>10} {batch:>5} {found['base']:8.1f} {cells} {ratio:9.1f}x", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
