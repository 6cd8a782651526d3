"""Each fault, put into the package on purpose, turns its check red; without it the check is green."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from support import flow_checks as checks

from trtllm_r3.flow import ops
from trtllm_r3.flow.capturer import RouteCapturer
from trtllm_r3.flow.copier import RouteCopier
from trtllm_r3.flow.incarnations import Incarnations
from trtllm_r3.flow.layout import StepLayout
from trtllm_r3.flow.recorder import RouteRecorder
from trtllm_r3.flow.request_store import PerRequestRouteStore


class Mutant(NamedTuple):
    """In the source of `owner.name`, `old` becomes `new`; then `check` must fail."""

    owner: Any
    name: str
    old: str
    new: str
    check: Callable[[], None]


MUTANTS = {
    "drop the keep-alive": Mutant(
        RouteCapturer,
        "_take",
        "append((layer, row, ids))",
        "append((layer, row, address_only(ids)))",
        checks.check_keep_alive,
    ),
    "forget the ids at the gather": Mutant(
        RouteCapturer,
        "_close_pass",
        "self._open = False",
        "self._open = self._kept.clear()",
        checks.check_keep_alive,
    ),
    "drop the poison": Mutant(
        RouteRecorder, "begin_step", ".fill_(self.capturer.poison)", "", checks.check_poison
    ),
    "off by one position in a mixed step": Mutant(
        StepLayout, "wanted", "self.positions - first", "self.positions - first + 1", checks.check_positions
    ),
    "off by one position in a decode step": Mutant(
        StepLayout, "wanted", "self.positions[rows]", "self.positions[rows] + 1", checks.check_positions
    ),
    "rows of skipped spans not counted": Mutant(
        StepLayout, "wanted", "row, span = row[keep]", "row, span = row[: keep.sum()]", checks.check_positions
    ),
    "swap two layers": Mutant(
        RouteCapturer,
        "hear",
        "self._take(visit.layer,",
        "self._take({1: 2, 2: 1}.get(visit.layer, visit.layer),",
        checks.check_positions,
    ),
    "the last write wins": Mutant(
        PerRequestRouteStore,
        "_claim",
        "self._cause[at] == _ABSENT",
        "self._cause[at] >= 0",
        checks.check_first_pass_wins,
    ),
    "keep the row of a dropped token": Mutant(
        RouteRecorder, "resume", "self.store.forget(track.slot, limit)", "", checks.check_first_pass_wins
    ),
    "an old incarnation writes above the limit": Mutant(
        Incarnations, "writing", "(position_N < self._limit[slot_N])", "True", checks.check_first_pass_wins
    ),
    "no incarnations": Mutant(
        Incarnations, "writing", "self._stamps[slot_N] == stamp_N", "stamp_N > 0", checks.check_slot_reuse
    ),
    "no snapshot on the device": Mutant(
        RouteCopier, "stage", "host.copy_(device,", "host.copy_(routes_RLK[:rows],", checks.check_snapshot
    ),
    "no wait at the finish": Mutant(
        RouteRecorder, "_last_step_of", "return ticket.layout.step", "return -1", checks.check_snapshot
    ),
    "no check of the range": Mutant(ops, "_put", "(ids_NMK < 0)", "(ids_NMK > 1 << 40)", checks.check_range),
    "a full ring goes unsaid": Mutant(
        RouteRecorder, "end_step", "self._lose(layout, Cause.STAGING)", "pass", checks.check_ring
    ),
    "the epoch of the commit": Mutant(
        RouteRecorder,
        "_commit",
        "rows_NLK, layout.epoch, causes)",
        "rows_NLK, self.epoch, causes)",
        checks.check_epochs,
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    original = getattr(mutant.owner, mutant.name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is not in {mutant.name} once"
    scope = {**original.__globals__, "address_only": checks.address_only}
    exec("from __future__ import annotations\n" + source.replace(mutant.old, mutant.new), scope)
    monkeypatch.setattr(mutant.owner, mutant.name, scope[mutant.name])


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    plant(monkeypatch, mutant)
    with pytest.raises(AssertionError):
        mutant.check()


@pytest.mark.parametrize("name", [name for name in dir(checks) if name.startswith("check_")])
def test_without_a_fault_the_check_is_green(name: str) -> None:
    getattr(checks, name)()
