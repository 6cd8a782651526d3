"""Which row of a forward belongs to which position of which request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_r3.flow.layout import SKIP, StepLayout


def layout_of(*spans: tuple[int, int, int, int]) -> StepLayout:
    """Spans as (slot, stamp, position, count)."""
    columns = np.array(spans, np.int64).reshape(-1, 4).T.copy()
    return StepLayout(1, 0, *columns)


def by_hand(spans: list[tuple[int, int, int, int]]) -> list[tuple[int, ...]]:
    found, row = [], 0
    for slot, stamp, position, count in spans:
        for i in range(count):
            if slot != SKIP:
                found.append((row, slot, stamp, position + i))
            row += 1
    return found


def wanted(layout: StepLayout) -> list[tuple[int, ...]]:
    return [tuple(row) for row in np.stack(layout.wanted(), 1).tolist()]


def test_a_mixed_step_counts_the_rows_of_skipped_spans() -> None:
    layout = layout_of((2, 7, 40, 3), (SKIP, -1, 0, 2), (0, 5, 9, 1))
    assert layout.rows == 6
    assert wanted(layout) == [(0, 2, 7, 40), (1, 2, 7, 41), (2, 2, 7, 42), (5, 0, 5, 9)]


def test_a_decode_step_takes_one_row_of_each_and_passes_over_dummies() -> None:
    layout = layout_of((SKIP, -1, 0, 1), (3, 4, 17, 1), (SKIP, -1, 0, 1), (1, 6, 5, 1))
    assert wanted(layout) == [(1, 3, 4, 17), (3, 1, 6, 5)]


@pytest.mark.parametrize(
    "spans", [[], [(SKIP, -1, 0, 4)], [(1, 1, 3, 0)]], ids=["empty", "dummies", "no rows"]
)
def test_a_step_may_hold_no_row_that_anybody_wants(spans: list[tuple[int, int, int, int]]) -> None:
    assert wanted(layout_of(*spans)) == []


SPAN = st.tuples(st.sampled_from([SKIP, 0, 1, 2]), st.integers(1, 9), st.integers(0, 99), st.integers(0, 5))


@given(st.one_of(st.lists(SPAN), st.lists(SPAN.map(lambda span: (*span[:3], 1)))))
def test_rows_are_those_counted_by_hand(spans: list[tuple[int, int, int, int]]) -> None:
    layout = layout_of(*spans)
    assert wanted(layout) == by_hand(spans)
    assert layout.rows == sum(span[3] for span in spans)


def test_a_step_reaches_a_request_only_in_its_incarnation_and_below_the_limit() -> None:
    layout = layout_of((2, 7, 40, 3), (0, 5, 9, 1))
    assert layout.reaches(2, 7, 41)
    assert not layout.reaches(2, 7, 40)
    assert not layout.reaches(2, 6, 99)
    assert not layout.reaches(1, 5, 99)
