"""Graphs: a replay repeats the recorded operators on what the static tensors hold now, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import trtllm_r3.standin

trtllm_r3.standin.install()

from tensorrt_llm._torch.pyexecutor.cpu_graph import CpuGraph  # noqa: E402

_LIB = torch.library.Library("graphtest", "FRAGMENT")
_LIB.define("scale_all(Tensor(a!)[] targets, Tensor by, Tensor(b!) total) -> (Tensor, Tensor[])")
_LIB.define("note(Tensor x) -> ()")
CALLS: list[str] = []


def _scale_all(
    targets: list[torch.Tensor], by: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    CALLS.append("scale_all")
    for target in targets:
        target.mul_(by)
        total.add_(target.sum().item())
    return total.clone(), [target + 1 for target in targets]


_LIB.impl("scale_all", _scale_all, "CompositeExplicitAutograd")
_LIB.impl("note", lambda x: CALLS.append(str(x.tolist())), "CompositeExplicitAutograd")


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def views(x: torch.Tensor) -> torch.Tensor:
    """Views of views, of inputs and of results."""
    y = (x + 1).t()
    return y[1:].reshape(-1) * x.view(-1)[: y[1:].numel()]


def in_place(x: torch.Tensor) -> torch.Tensor:
    """In-place and out= operators, also through views and with changes of shape."""
    y = torch.zeros(4, 6)
    y[:, :3].copy_(x[:, :3]).mul_(2)
    y[1].add_(x[0])
    torch.add(x, 1, out=y[:, :])
    z = x * 3
    z.unsqueeze_(0).transpose_(1, 2)
    z.squeeze_(0).add_(y.t())
    z[z.t().t() > 3] = 0
    return z


def many_results(x: torch.Tensor) -> list[torch.Tensor]:
    """topk, sort, split, unbind, chunk, max."""
    values, ids = torch.topk(x, 2, dim=-1)
    left, right = (x * 2).split([2, 4], dim=-1)
    rows = torch.sort(x, dim=0).values.unbind(0)
    return [values, ids, left + 1, right, rows[2], *(x - 1).chunk(2), *x.max(dim=1)]


def indexed(x: torch.Tensor) -> torch.Tensor:
    """Gathers, scatters and indexing by tensors."""
    ids = x.argsort(dim=-1)
    out = torch.zeros_like(x).scatter_(1, ids[:, :2], 1.0)
    out.index_copy_(0, ids[:1, 0].clamp(max=3), x[:1])
    out[ids[:, 0].clamp(max=3), ids[:, 1]] += 1
    return out.gather(1, ids) + x[ids[:, 2].clamp(max=3)] + x.repeat_interleave(1, dim=0)


def layers(x: torch.Tensor) -> torch.Tensor:
    """What models are made of."""
    weight = torch.arange(36.0).view(6, 6) / 36
    y = torch.nn.functional.linear(x, weight, weight[0])
    y = torch.nn.functional.rms_norm(y, (6,)) @ weight
    y = torch.nn.functional.scaled_dot_product_attention(y[None, None], y[None, None], x[None, None])[0, 0]
    return torch.softmax(y.float(), -1).to(torch.bfloat16).to(torch.float32)


def mixed_types(x: torch.Tensor) -> list[torch.Tensor]:
    """Expanded, empty, boolean and constant tensors."""
    return [
        (x.sum() + 1).expand(3),
        x.new_empty(0, 3) + 1,
        x > 0,
        x + torch.tensor(2.0),
        torch.cat([x[:1], x[1:]]),
        torch.where(x > 0, x, torch.full((), 7.0)),
        torch.empty(2).fill_(3) * x[0, 0],
    ]


def _flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _same(one: Any, other: Any) -> bool:
    pairs = zip(_flat(one), _flat(other), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride() for a, b in pairs)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("function", [views, in_place, many_results, indexed, layers])
def test_a_replay_equals_an_eager_run(function: Callable[[torch.Tensor], Any], inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        x = torch.randn(4, 6)
        graph = CpuGraph()
        eager = function(x)
        with graph.record():
            recorded = function(x)
        assert _same(recorded, eager)
        for _ in range(3):
            x.copy_(torch.randn(4, 6))
            expected = function(x)
            graph.replay()
            assert _same(recorded, expected)


def test_a_replay_renews_results_of_all_kinds() -> None:
    x, graph = torch.randn(4, 6), CpuGraph()
    with graph.record():
        recorded = mixed_types(x)
    x.copy_(torch.randn(4, 6))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(recorded, mixed_types(x), strict=True))


def test_a_custom_operator_is_one_step_and_changes_its_arguments_at_each_replay() -> None:
    a, b, total, by = torch.ones(3), torch.ones(2), torch.zeros(1), torch.tensor(2.0)
    graph = CpuGraph()
    CALLS.clear()
    with graph.record():
        inner = by + 0
        seen, more = torch.ops.graphtest.scale_all([a, b], inner, total)
        torch.ops.graphtest.note(more[0])
    assert CALLS == ["scale_all", "[3.0, 3.0, 3.0]"]
    by.fill_(3)
    graph.replay()
    assert a.tolist() == [6.0] * 3
    assert b.tolist() == [6.0] * 2
    assert total.tolist() == seen.tolist() == [40.0]
    assert more[0].tolist() == [7.0] * 3
    assert more[1].tolist() == [7.0] * 2
    assert CALLS[2:] == ["scale_all", "[7.0, 7.0, 7.0]"]


def test_hooks_do_not_run_at_a_replay_but_what_they_computed_does() -> None:
    calls, x, copy = [], torch.ones(2, 3), torch.zeros(2, 3)

    def hook(module: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        calls.append(1)
        copy.copy_(out)

    layer, graph = torch.nn.Linear(3, 3), CpuGraph()
    layer.register_forward_hook(hook)
    with graph.record():
        out = layer(x)
    x.mul_(5)
    graph.replay()
    assert len(calls) == 1
    assert torch.equal(copy, out)
    assert torch.equal(out, torch.nn.functional.linear(x, layer.weight, layer.bias))


FORBIDDEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "_local_scalar_dense": lambda x: x[0].item(),
    "_local_scalar_dense ": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "nonzero ": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "index.Tensor": lambda x: x[x > 0],
    "index_put_": lambda x: x.index_put_((x > 0,), x),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64)),
    "rand": lambda x: torch.rand(3),
    "bernoulli_": lambda x: torch.nn.functional.dropout(x, 0.5, training=True),
    "multinomial": lambda x: x.multinomial(1),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_a_graph_cannot_hold_is_refused_by_name(name: str) -> None:
    graph = CpuGraph()
    with pytest.raises(RuntimeError, match=f"capturing: .*{name.strip()}"), graph.record():
        FORBIDDEN[name](torch.ones(3))
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        graph.replay()
    assert torch.ones(3).sum().item() == 3


def test_a_length_that_is_given_needs_no_host_read() -> None:
    counts, graph = torch.tensor([2, 1]), CpuGraph()
    with graph.record():
        out = torch.arange(2).repeat_interleave(counts, output_size=3)
    counts.copy_(torch.tensor([0, 3]))
    graph.replay()
    assert out.tolist() == [1, 1, 1]


def test_a_reset_graph_records_again() -> None:
    x, graph = torch.ones(1), CpuGraph()
    with graph.record():
        out = x + 1
    graph.reset()
    with graph.record():
        out = x + 2
    graph.replay()
    assert out.item() == 3
    with graph.record(), pytest.raises(RuntimeError, match="in progress"), CpuGraph(graph.pool()).record():
        pass


def test_host_tensors_may_be_read_and_kernels_may_read_all() -> None:
    x, host, total, graph = torch.ones(3), torch.tensor([3]), torch.zeros(1), CpuGraph()
    with graph.record(host_tensors=[host]):
        assert (host + 1).tolist() == [4]
        torch.ops.graphtest.note(x)
        out = x * int(host[0])
        torch.ops.graphtest.scale_all([x], x + 1, total)
    graph.replay()
    assert out.tolist() == [6.0] * 3
    assert total.item() == 24
