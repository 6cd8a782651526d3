"""What counts as a tie, and how a row is checked after one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from trtllm_r3.cli.demo_model import build_checkpoint, quiet
from trtllm_r3.cli.reference import TIE, Comparison, Reference, compare, is_tie


def logits(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("gap", "tie"), [(0.0, True), (0.9 * TIE, True), (1.1 * TIE, False), (1e-3, False)])
def test_a_tie_is_as_good_as_equal_within_the_range_of_its_row(gap, tie):
    for scale in (0.01, 1.0, 1000.0):
        row = logits(4, 3, 2, 2 - 4 * gap, 0) * scale
        assert is_tie([0, 1, 3], [0, 1, 2], row) is tie


def test_all_disputed_ids_have_to_be_as_good_as_equal():
    row = logits(5, 3, 3, 3, 0)
    assert is_tie([0, 1, 2], [0, 2, 3], row)
    assert not is_tie([0, 4, 1], [0, 1, 2], row)
    assert not is_tie([1, 2, 3], [0, 1, 2], row)


@pytest.mark.parametrize("ids", [[1, 1, 2], [0, 1, 9]])
def test_ids_that_are_no_set_of_experts_are_no_tie(ids):
    assert not is_tie(ids, [0, 1, 2], logits(1, 1, 1, 1))


def test_rows_are_compared_as_sets_and_missing_ones_are_left_out():
    wanted = torch.tensor([[[0, 1], [1, 2]], [[2, 3], [0, 3]], [[0, 1], [0, 1]]])
    scores = torch.zeros(3, 2, 4).scatter_(-1, wanted, torch.tensor([2.0, 1.0]).expand(3, 2, 2))
    ids = wanted.flip(-1).clone()
    assert compare(ids, scores) == Comparison(rows=3, places=6)
    ids[1, 0] = -1
    assert compare(ids, scores) == Comparison(rows=2, missing=1, places=5)
    ids[2, 1] = torch.tensor([1, 2])
    assert compare(ids, scores) == Comparison(rows=2, missing=1, places=5, unexplained={(2, 1)})
    scores[2, 1] = torch.tensor([1.0, 2.0, 1.0, 0.0])
    assert compare(ids, scores).unexplained == set()
    assert compare(ids.roll(1, 0), scores).unexplained != set()


def test_one_tie_in_a_thousand_is_the_most():
    total = Comparison()
    total.add(Comparison(rows=500, places=2000, ties={(0, 0), (0, 1)}))
    assert total.good
    assert total.differing_rows == 1
    total.add(Comparison(rows=1, places=1, ties={(0, 0)}))
    assert not total.good
    total = Comparison()
    total.add(Comparison(rows=500, places=2000, unexplained={(4, 1)}))
    assert not total.good


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = build_checkpoint(tmp_path_factory.mktemp("model"))
    with quiet():
        return Reference(Path(path))


TOKENS = list(range(30, 60))
PLACE = (12, 1)


def other_choice(reference: Reference) -> torch.Tensor:
    """Ids of TOKENS where the router took its fifth expert instead of its fourth at PLACE."""
    plain = reference.router_logits(TOKENS)
    swapped = plain[PLACE].topk(5).indices[[0, 1, 2, 4]]
    ids = reference.router_logits(TOKENS, {PLACE: swapped}).topk(4, -1).indices
    ids[PLACE] = swapped
    return ids


def test_the_reference_agrees_with_itself(reference):
    ids = reference.router_logits(TOKENS).topk(4, -1).indices.to(torch.int16)
    assert reference.check(TOKENS, ids) == Comparison(rows=30, places=120)


def test_rows_shifted_by_one_or_layers_swapped_are_unexplained(reference):
    ids = reference.router_logits(TOKENS).topk(4, -1).indices
    for wrong in (ids.roll(1, 0), ids.roll(-1, 0), ids.flip(1)):
        assert len(reference.check(TOKENS, wrong).unexplained) > 60


def test_another_choice_changes_what_follows(reference):
    found = reference.check(TOKENS, other_choice(reference))
    assert PLACE in found.unexplained
    assert not found.ties


def test_after_a_tie_the_rest_is_checked_with_the_choice_of_the_engine(reference, monkeypatch):
    """The gate's logits of the fourth and fifth expert are made equal at PLACE, and nowhere else."""
    ids = other_choice(reference)
    four, five = reference.router_logits(TOKENS)[PLACE].topk(5).indices[3:].tolist()
    gate = reference.model.model.layers[PLACE[1]].mlp.gate
    plain = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        out = plain(x, weight, bias)
        if weight is gate.weight:
            out[PLACE[0], five] = out[PLACE[0], four] - 1e-7
        return out

    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(torch.nn.functional, "linear", linear)
        ids = other_choice(reference)
        found = reference.check(TOKENS, ids)
        assert found.ties == {PLACE}
        assert found.unexplained == set()
        ids[20, 2] = ids[19, 2]
        assert reference.check(TOKENS, ids).unexplained == {(20, 2)}
