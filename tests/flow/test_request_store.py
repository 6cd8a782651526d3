"""Rows by absolute position, in pages that requests share one arena of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtllm_r3.flow.causes import Cause
from trtllm_r3.flow.request_store import PAGE, PerRequestRouteStore

L, K = 5, 3


def store_of(pages: int = 2, top_k: int = K, dtype: type = np.uint8) -> PerRequestRouteStore:
    return PerRequestRouteStore(layers=L, top_k=top_k, dtype=dtype, pages=pages)


def rows_of(positions: list[int], salt: int = 0, top_k: int = K) -> np.ndarray:
    """[N, L, K], another in each position, distinct within a row."""
    first = (np.array(positions)[:, None] * 7 + np.arange(L) * 13 + salt) % 200
    return (first[..., None] + np.arange(top_k) * 5).astype(np.uint8 if top_k > 1 else np.int16)


def put(store: PerRequestRouteStore, slot: int, positions: list[int], salt: int = 0, epoch: int = 0) -> int:
    slots = np.full(len(positions), slot, np.int64)
    return store.commit(slots, np.array(positions, np.int64), rows_of(positions, salt, store.top_k), epoch)[0]


def test_the_first_write_of_a_position_wins() -> None:
    store = store_of()
    slot = store.open()
    put(store, slot, [0, 1, 2])
    put(store, slot, [1, 2, 3], salt=50, epoch=4)
    put(store, slot, [0, 1, 2, 3], salt=90, epoch=5)
    rows, causes, epochs = store.read(slot, 0, 4)
    assert np.array_equal(rows[:3], rows_of([0, 1, 2]))
    assert np.array_equal(rows[3:], rows_of([3], salt=50))
    assert causes.tolist() == [Cause.CAPTURED] * 4
    assert epochs.tolist() == [0, 0, 0, 4]


def test_one_commit_may_hold_rows_of_many_requests_and_many_pages() -> None:
    store = store_of()
    one, two = store.open(), store.open()
    first, second = list(range(60, 200)), [5, 6, 7]
    slots = np.array([one] * 140 + [two] * 3, np.int64)
    store.commit(slots, np.array(first + second, np.int64), rows_of(first + second), 0)
    assert np.array_equal(store.read(one, 60, 200)[0], rows_of(first))
    assert np.array_equal(store.read(two, 5, 8)[0], rows_of(second))
    assert store.pages_used == 4 + 1


def test_what_nobody_wrote_reads_as_absent_marks() -> None:
    store = store_of()
    slot = store.open()
    put(store, slot, [2, 3])
    rows, causes, epochs = store.read(slot, 0, 3 * PAGE)
    assert rows.shape == (3 * PAGE, L, K)
    assert causes.tolist() == [0, 0, 1, 1] + [0] * (3 * PAGE - 4)
    assert epochs.tolist() == [-1, -1, 0, 0] + [-1] * (3 * PAGE - 4)
    assert not rows[causes == Cause.ABSENT].any()


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (4, 4), (900, 900), (900, 903)])
def test_reading_nothing_or_far_beyond_gives_rows_of_the_asked_number(start: int, stop: int) -> None:
    store = store_of()
    slot = store.open()
    put(store, slot, [0, 1])
    rows, causes, epochs = store.read(slot, start, stop)
    assert (rows.shape, len(causes), len(epochs)) == ((stop - start, L, K), stop - start, stop - start)
    assert not causes.any()


def test_a_slot_that_is_opened_again_holds_nothing_of_its_last_owner() -> None:
    store = store_of()
    slot = store.open()
    put(store, slot, list(range(2 * PAGE)), epoch=9)
    store.close(slot)
    assert (store.live, store.pages_used) == (0, 0)
    assert store.open() == slot
    put(store, slot, [PAGE + 1], salt=3)
    rows, causes, epochs = store.read(slot, 0, 2 * PAGE)
    assert np.flatnonzero(causes).tolist() == [PAGE + 1]
    assert np.flatnonzero(epochs >= 0).tolist() == [PAGE + 1]
    assert np.flatnonzero(rows.any((1, 2))).tolist() == [PAGE + 1]


def test_the_arena_and_the_tables_grow_and_keep_their_rows() -> None:
    store = store_of(pages=1)
    slots = [store.open() for _ in range(40)]
    assert len(set(slots)) == store.live == 40
    for slot in slots:
        put(store, slot, list(range(slot, slot + 3)), salt=slot)
    put(store, slots[0], [20 * PAGE], salt=7)
    for slot in slots:
        assert np.array_equal(store.read(slot, slot, slot + 3)[0], rows_of(list(range(slot, slot + 3)), slot))
    assert np.array_equal(store.read(slots[0], 20 * PAGE, 20 * PAGE + 1)[0], rows_of([20 * PAGE], 7))
    assert store.nbytes >= 60 * PAGE * L * K


def test_forgotten_positions_are_written_anew_and_earlier_ones_stay() -> None:
    store = store_of()
    slot = store.open()
    put(store, slot, list(range(70)))
    store.forget(slot, 65)
    assert store.read(slot, 0, 70)[1].tolist() == [1] * 65 + [0] * 5
    put(store, slot, list(range(60, 70)), salt=9)
    rows = store.read(slot, 0, 70)[0]
    assert np.array_equal(rows[:65], rows_of(list(range(65))))
    assert np.array_equal(rows[65:], rows_of(list(range(65, 70)), salt=9))


def test_a_marked_position_is_missing_for_good_and_says_why() -> None:
    store = store_of()
    slot = store.open()
    put(store, slot, [1])
    where = np.array([0, 1, 2], np.int64)
    store.mark(np.full(3, slot, np.int64), where, Cause.STAGING, 2)
    assert put(store, slot, [0, 1, 2, 3]) == 0
    rows, causes, epochs = store.read(slot, 0, 4)
    assert causes.tolist() == [Cause.STAGING, Cause.CAPTURED, Cause.STAGING, Cause.CAPTURED]
    assert epochs.tolist() == [2, 0, 2, 0]
    assert not rows[[0, 2]].any()


@pytest.mark.parametrize(("top_k", "dtype"), [(3, np.uint8), (1, np.int16)])
def test_marks_of_the_device_become_causes_and_are_counted(top_k: int, dtype: type) -> None:
    store = store_of(top_k=top_k, dtype=dtype)
    slot, rows = store.open(), rows_of([0, 1, 2, 3, 4], top_k=top_k)
    for row, code in ((1, 0), (2, 1), (3, 2)):
        rows[row, 4] = code if top_k > 1 else -1 - code
    assert store.commit(np.full(5, slot, np.int64), np.arange(5), rows, 0) == (3, 0)
    found = [Cause(c).label for c in store.read(slot, 0, 5)[1]]
    assert found == ["captured", "not captured", "out of range", "changed", "captured"]
    assert np.array_equal(store.read(slot, 0, 5)[0], rows)


def test_positions_computed_again_with_other_ids_are_counted_and_not_stored() -> None:
    store = store_of()
    slot = store.open()
    put(store, slot, [0, 1, 2])
    again = rows_of([0, 1, 2, 3])
    again[1] = again[1][:, ::-1]
    assert store.commit(np.full(4, slot, np.int64), np.arange(4), again, 0) == (0, 1)
    assert np.array_equal(store.read(slot, 0, 4)[0], rows_of([0, 1, 2, 3]))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "mark", "forget", "close"]),
        st.integers(0, 2),
        st.integers(0, 3 * PAGE),
        st.integers(0, PAGE + 5),
    ),
    max_size=25,
)


def run_on_both(
    store: PerRequestRouteStore,
    slots: list[int],
    model: list[dict[int, tuple[int, int]]],
    operation: tuple,
    salt: int,
) -> None:
    """One operation on the store and on dictionaries position -> (cause, salt)."""
    kind, owner, first, count = operation
    positions = list(range(first, first + count))
    if kind == "put":
        put(store, slots[owner], positions, salt)
        model[owner] = dict.fromkeys(positions, (1, salt)) | model[owner]
    elif kind == "mark":
        where = np.array(positions, np.int64)
        store.mark(np.full(count, slots[owner], np.int64), where, Cause.LAYOUT, 0)
        model[owner] = {p: (int(Cause.LAYOUT), -1) for p in positions} | model[owner]
    elif kind == "forget":
        store.forget(slots[owner], first)
        model[owner] = {p: v for p, v in model[owner].items() if p < first}
    else:
        store.close(slots[owner])
        slots[owner], model[owner] = store.open(), {}


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(OPERATIONS)
def test_the_store_does_what_dictionaries_would(operations: list[tuple[str, int, int, int]]) -> None:
    store = store_of(pages=1)
    slots, model = [store.open() for _ in range(3)], [{}, {}, {}]
    for salt, operation in enumerate(operations):
        run_on_both(store, slots, model, operation, salt)
    for slot, known in zip(slots, model, strict=True):
        rows, causes, _ = store.read(slot, 0, 5 * PAGE)
        assert causes.tolist() == [known.get(p, (0, 0))[0] for p in range(5 * PAGE)]
        for salt in {salt for cause, salt in known.values() if cause == 1}:
            mine = sorted(p for p, value in known.items() if value == (1, salt))
            assert np.array_equal(rows[mine], rows_of(mine, salt))
    pages = [len({position // PAGE for position in known}) for known in model]
    assert store.pages_used >= sum(pages)
