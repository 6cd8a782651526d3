"""What travels to the caller, and the Routes that come out of it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from support.flow_oracle import Shape, expected_ids

from trtllm_r3.flow.causes import Cause
from trtllm_r3.flow.ops import mark
from trtllm_r3.flow.payload import Payload, pack, pack_none, runs, unpack
from trtllm_r3.flow.routes import Gap, Routes, Run

SHAPE = Shape()


def ids_of(rows: int, start: int = 0, shape: Shape = SHAPE) -> np.ndarray:
    return expected_ids(range(rows), range(start, start + rows), shape)


def packed(
    ids: np.ndarray,
    *,
    causes: dict[int, Cause] | None = None,
    epochs: list[int] | None = None,
    shape: Shape = SHAPE,
    **options: Any,
) -> Payload:
    """Rows of a store that holds `ids`; those with a cause hold marks."""
    narrow = ids.astype(np.uint8 if shape.experts <= 256 and shape.top_k > 1 else np.int16)
    column = np.full(len(ids), Cause.CAPTURED, np.uint8)
    for row, cause in (causes or {}).items():
        narrow[row], column[row] = mark(0, shape.top_k), cause
    told = {"start": 0, "generated": 3, "num_experts": shape.experts, "counters": {"rows": 9}, **options}
    versions = np.array(epochs or [0] * len(ids), np.int32)
    return pack(narrow, column, versions, moe_layer_ids=range(2, 2 + shape.layers), **told)


@pytest.mark.parametrize(
    "shape",
    [SHAPE, Shape(experts=256), Shape(experts=300), Shape(top_k=1), Shape(top_k=1, experts=256)],
    ids=str,
)
def test_what_is_packed_is_unpacked(shape: Shape) -> None:
    ids = ids_of(9, shape=shape)
    payload = packed(ids, shape=shape)
    routes = unpack(Payload(*pickle.loads(pickle.dumps(tuple(payload)))), 3)
    assert np.array_equal(routes.ids.numpy(), ids)
    assert routes.complete is True
    assert (routes.top_k, routes.num_experts, routes.moe_layer_ids) == (
        shape.top_k,
        shape.experts,
        (2, 3, 4, 5, 6),
    )
    assert routes.counters == {"rows": 9}


def test_ids_are_int16_contiguous_writable_and_own_their_memory() -> None:
    payload = packed(ids_of(9))
    ids = unpack(payload, 2).ids
    assert (ids.dtype, ids.device.type) == (torch.int16, "cpu")
    assert ids.is_contiguous()
    assert ids.untyped_storage().nbytes() == ids.numel() * 2
    ids += 0
    ids.numpy()[0, 0, 0] = 1
    assert payload.ids.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr()


def test_rows_of_tokens_that_the_caller_cut_off_are_dropped_with_their_gaps_and_versions() -> None:
    causes = {6: Cause.STAGING, 7: Cause.STAGING, 8: Cause.FAULT}
    routes = unpack(packed(ids_of(9), causes=causes, epochs=[0] * 5 + [1] * 2 + [2] * 2), 1)
    assert len(routes) == 7
    assert routes.gaps == (Gap(6, 7, "staging"),)
    assert routes.versions == (Run(0, 5, 0), Run(5, 7, 1))
    assert routes.epochs.tolist() == [0] * 5 + [1] * 2


@pytest.mark.parametrize("kept", [3, 4, 100])
def test_a_caller_that_kept_every_token_gets_every_row(kept: int) -> None:
    assert len(unpack(packed(ids_of(9)), kept)) == 9


def test_a_caller_that_cut_more_tokens_than_there_are_rows_gets_none() -> None:
    routes = unpack(packed(ids_of(2), generated=9), 0)
    assert tuple(routes.ids.shape) == (0, 5, 3)


def test_a_missing_row_is_minus_one_and_the_others_are_untouched() -> None:
    ids = ids_of(9, start=4)
    routes = unpack(packed(ids, causes={0: Cause.PREFIX, 1: Cause.PREFIX, 5: Cause.STAGING}, start=4), 3)
    wanted = torch.from_numpy(ids).to(torch.int16)
    wanted[[0, 1, 5]] = -1
    assert torch.equal(routes.ids, wanted)
    assert routes.gaps == (Gap(4, 6, "prefix"), Gap(9, 10, "staging"))
    assert routes.missing.nonzero().flatten().tolist() == [0, 1, 5]
    assert list(routes.positions) == list(range(4, 13))
    assert routes.complete is False


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_row_of_which_one_layer_is_missing_keeps_the_ids_of_the_others(top_k: int) -> None:
    shape = Shape(top_k=top_k)
    ids = ids_of(4, shape=shape)
    payload = packed(ids, shape=shape)
    narrow = payload.ids.clone()
    narrow[2, 3] = mark(1, top_k)
    causes = np.array([1, 1, Cause.OUT_OF_RANGE, 1], np.uint8)
    options = {"start": 0, "generated": 3, "num_experts": 11, "counters": {}, "moe_layer_ids": range(5)}
    routes = unpack(pack(narrow.numpy(), causes, np.zeros(4, np.int32), **options), 3)
    ids[2, 3] = -1
    assert np.array_equal(routes.ids.numpy(), ids)
    assert routes.missing.tolist() == [False, False, True, False]


def test_id_255_of_256_experts_is_an_expert_and_not_a_gap() -> None:
    shape = Shape(experts=256)
    ids = np.broadcast_to(np.array([255, 0, 254], np.int32), (4, 5, 3))
    routes = unpack(packed(ids, shape=shape), 3)
    assert np.array_equal(routes.ids.numpy(), ids)
    assert routes.complete


def test_positions_never_computed_have_no_version() -> None:
    routes = unpack(packed(ids_of(5), causes={0: Cause.PREFIX}, epochs=[-1, 4, 4, 6, 6]), 3)
    assert routes.versions == (Run(1, 3, 4), Run(3, 5, 6))
    assert routes.epochs.tolist() == [-1, 4, 4, 6, 6]


def test_no_routes_come_with_the_reason() -> None:
    routes = unpack(pack_none("ended before it was computed", {"pid": 7}), 0)
    assert routes.ids is None
    assert routes.why_none == "ended before it was computed"
    assert (len(routes), routes.top_k, routes.complete, routes.missing.tolist()) == (0, 0, False, [])
    assert repr(routes) == "Routes(None: ended before it was computed)"
    assert routes.counters == {"pid": 7}


def test_the_repr_says_how_much_there_is_and_how_much_is_missing() -> None:
    routes = unpack(packed(ids_of(9), causes={1: Cause.FAULT, 2: Cause.LAYOUT}, start=6), 3)
    assert repr(routes) == "Routes(9 rows from 6, 5 layers, top-3 of 11, 2 missing)"


def test_of_native_routes_nobody_knows_whether_they_are_complete() -> None:
    assert Routes(torch.zeros(2, 5, 3, dtype=torch.int16), source="native").complete is None


@pytest.mark.parametrize(("experts", "itemsize"), [(128, 1), (512, 2)])
def test_a_pickled_payload_is_as_large_as_its_ids(experts: int, itemsize: int) -> None:
    shape = Shape(layers=48, top_k=8, experts=experts)
    payload = packed(ids_of(900, shape=shape), shape=shape)
    size = len(pickle.dumps(tuple(payload)))
    assert size <= 1.01 * 900 * 48 * 8 * itemsize + 4096


def test_runs_count_from_the_start_given() -> None:
    assert runs(np.array([3, 3, 0, 3]), 5) == [(5, 7, 3), (7, 8, 0), (8, 9, 3)]
    assert runs(np.array([], np.uint8), 5) == []
