"""Rows of KV blocks: served only where it is proven that they belong to the KV."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_r3.flow.causes import Cause
from trtllm_r3.flow.shared_cache import Lease, SharedRouteCache

B, L, K = 4, 3, 2
SALT = b"scope"


class Engine:
    """A cache and the little of an engine that its calls need: who computes what in which step."""

    def __init__(self, blocks: int = 12) -> None:
        self.cache = SharedRouteCache(blocks=blocks, tokens_per_block=B, layers=L, top_k=K, dtype=np.uint8)
        self.step = 0
        self.slot = 0

    def start(self, blocks: list[int], tokens: list[int], hits: int = 0, scope: bytes = SALT) -> Lease:
        self.step += 1
        self.slot += 1
        return self.cache.lease(self.slot, scope, blocks, tokens, hits, self.step)

    def rows(self, salt: int, positions: range) -> np.ndarray:
        first = np.array([(salt * 16 + p) % 120 for p in positions], np.uint8)
        return np.stack([np.stack([first + layer, first + layer + 100], -1) for layer in range(L)], 1)

    def compute(self, lease: Lease, salt: int, positions: range, step: int | None = None) -> None:
        at = self.cache.places(np.full(len(positions), lease.slot), np.array(positions))
        assert (at >= 0).all()
        causes = np.full(len(positions), Cause.CAPTURED, np.uint8)
        self.cache.write(at, self.rows(salt, positions), causes, salt, self.step if step is None else step)

    def finished(self, blocks: list[int], tokens: list[int], salt: int, hits: int = 0) -> Lease:
        lease = self.start(blocks, tokens, hits)
        self.compute(lease, salt, range(hits, len(tokens)))
        self.cache.let_go(lease, tokens)
        return lease

    def causes(self, lease: Lease) -> list[str]:
        return [Cause(c).label for c in self.cache.read(lease, 0, lease.first)[1]]


TOKENS = list(range(10, 22))


def test_whole_blocks_are_served_with_rows_and_epochs() -> None:
    engine = Engine()
    engine.finished([3, 5, 7], TOKENS, salt=1)
    lease = engine.start([3, 5, 8], [*TOKENS[:8], 1, 2], hits=8)
    rows, causes, epochs = engine.cache.read(lease, 2, 8)
    assert np.array_equal(rows, engine.rows(1, range(2, 8)))
    assert set(causes.tolist()) == {Cause.CAPTURED}
    assert set(epochs.tolist()) == {1}


@pytest.mark.parametrize("change", ["tokens", "scope", "block", "prefix"])
def test_what_is_not_the_requests_own_prefix_is_not_served(change: str) -> None:
    engine = Engine()
    engine.finished([3, 5, 7], TOKENS, salt=1)
    tokens = [99, *TOKENS[1:9]] if change == "prefix" else TOKENS[:9]
    if change == "tokens":
        tokens[6] = 99
    blocks = [3, 7 if change == "block" else 5, 8]
    lease = engine.start(blocks, tokens, hits=8, scope=b"other" if change == "scope" else SALT)
    served = 4 if change in ("tokens", "block") else 0
    assert engine.causes(lease) == ["captured"] * served + ["kv recomputed"] * (8 - served)


def test_generated_tokens_are_found_after_the_request_let_go() -> None:
    engine = Engine()
    first = engine.start([3, 5], TOKENS[:6])
    engine.compute(first, 1, range(8))
    engine.cache.extend(first, [3, 5, 7], engine.step)
    engine.compute(first, 1, range(8, 11))
    engine.cache.let_go(first, TOKENS)
    lease = engine.start([3, 5, 7], [*TOKENS[:11], 99], hits=11)
    assert engine.causes(lease) == ["captured"] * 11


def test_a_late_row_of_the_former_user_is_dropped() -> None:
    engine = Engine()
    old = engine.start([3, 5], TOKENS[:8])
    engine.compute(old, 1, range(7))
    late = engine.step
    engine.cache.let_go(old, TOKENS[:8])
    new = engine.start([5, 6], TOKENS[4:9])
    slot = np.array([5 * B + 3])
    engine.cache.write(slot, engine.rows(9, range(1)), np.array([1], np.uint8), 9, late)
    engine.compute(new, 2, range(3))
    engine.cache.let_go(new, TOKENS[4:9])
    hit = engine.start([5], [*TOKENS[4:8], 1], hits=4)
    assert engine.causes(hit) == ["captured"] * 3 + ["prefix"]


def test_a_late_row_of_an_owner_that_is_hit_already_is_kept() -> None:
    engine = Engine()
    owner = engine.start([3], TOKENS[:4])
    hit = engine.start([3, 6], TOKENS[:5], hits=4)
    engine.compute(owner, 1, range(4), step=1)
    assert engine.causes(hit) == ["captured"] * 4


def test_nothing_recorded_before_a_reset_is_served_to_a_later_hit() -> None:
    engine = Engine()
    engine.finished([3], TOKENS[:4], salt=1)
    before = engine.start([3, 6], TOKENS[:5], hits=4)
    engine.cache.new_kv_epoch()
    after = engine.start([3, 7], TOKENS[:5], hits=4)
    assert engine.causes(before) == ["captured"] * 4
    assert engine.causes(after) == ["kv recomputed"] * 4


def test_a_request_that_lives_across_a_reset_records_nothing_new() -> None:
    engine = Engine()
    old = engine.start([3, 4], TOKENS[:4])
    engine.compute(old, 1, range(7))
    engine.cache.new_kv_epoch()
    engine.cache.let_go(old, TOKENS[:8])
    assert engine.causes(engine.start([3, 4, 6], TOKENS[:9], hits=8)) == ["kv recomputed"] * 8


def test_a_leaf_that_nobody_else_could_have_supplied_is_taken_over() -> None:
    engine = Engine()
    engine.finished([3, 5], TOKENS[:7], salt=1)
    lease = engine.start([3, 5], [*TOKENS[:6], 90, 91], hits=6)
    assert engine.causes(lease) == ["captured"] * 6


def test_a_block_that_may_as_well_be_a_copy_is_not_served() -> None:
    engine = Engine()
    engine.finished([3, 5], TOKENS[:7], salt=1)
    engine.start([3, 8], TOKENS[:7], hits=4)  # lives, with the same content in its second block
    lease = engine.start([3, 5], [*TOKENS[:6], 90], hits=6)
    assert engine.causes(lease) == ["captured"] * 4 + ["kv recomputed"] * 2


def test_a_copy_out_of_the_only_possible_source_has_its_rows() -> None:
    engine = Engine()
    source = engine.start([3, 5], TOKENS[:7])
    engine.compute(source, 1, range(7))
    lease = engine.start([3, 9], [*TOKENS[:6], 90], hits=6)
    rows, causes, _ = engine.cache.read(lease, 0, 6)
    assert set(causes.tolist()) == {Cause.CAPTURED}
    assert np.array_equal(rows, engine.rows(1, range(6)))


def test_rows_of_a_copied_block_stay_when_the_source_is_given_away() -> None:
    engine = Engine()
    source = engine.start([3, 5], TOKENS[:7])
    engine.compute(source, 1, range(7))
    lease = engine.start([3, 9], [*TOKENS[:6], 90], hits=6)
    engine.cache.let_go(source, TOKENS[:7])
    engine.finished([5, 10], [70, 71, 72, 73, 74], salt=4)
    assert engine.causes(lease) == ["captured"] * 6
    assert np.array_equal(engine.cache.read(lease, 4, 6)[0], engine.rows(1, range(4, 6)))
    engine.cache.let_go(lease, [*TOKENS[:6], 90])
    assert engine.causes(engine.start([3, 9], [*TOKENS[:6], 91], hits=6)) == ["captured"] * 6


def test_rows_still_in_flight_when_their_block_was_copied_are_fetched_later() -> None:
    engine = Engine()
    source = engine.start([3, 5], TOKENS[:7])
    in_flight = engine.step
    lease = engine.start([3, 9], [*TOKENS[:6], 90], hits=6)
    assert engine.causes(lease) == ["prefix"] * 6
    engine.compute(source, 1, range(7), step=in_flight)
    assert engine.causes(lease) == ["captured"] * 6


def test_rows_in_flight_of_a_source_that_was_given_away_are_not_fetched() -> None:
    engine = Engine()
    source = engine.start([3, 5], TOKENS[:7])
    lease = engine.start([3, 9], [*TOKENS[:6], 90], hits=6)
    engine.cache.let_go(source, TOKENS[:7])
    engine.finished([5, 10], [70, 71, 72, 73, 74], salt=4)
    assert engine.causes(lease)[4:] == ["prefix"] * 2


def test_several_possible_sources_serve_what_they_agree_on() -> None:
    engine = Engine()
    for block, salt in ((5, 1), (6, 1), (7, 2)):
        engine.compute(engine.start([3, block], TOKENS[:7], hits=4), salt, range(4, 7))
        lease = engine.start([3, 9], [*TOKENS[:6], 90], hits=6)
        agreed = "captured" if block < 7 else "kv recomputed"
        assert engine.causes(lease)[4:] == [agreed] * 2
        engine.cache.let_go(lease, [*TOKENS[:4], 90])


def test_a_pool_that_is_recorded_in_part_proves_no_partial_hit() -> None:
    engine = Engine()
    engine.cache.complete = False
    engine.finished([3, 5], TOKENS[:7], salt=1)
    assert engine.causes(engine.start([3, 5], [*TOKENS[:6], 90], hits=6))[4:] == ["kv recomputed"] * 2


def test_a_block_that_generation_took_is_no_source_any_more() -> None:
    engine = Engine()
    engine.finished([3, 5], TOKENS[:7], salt=1)
    other = engine.start([6], [1, 2, 3, 4])
    engine.cache.extend(other, [6, 5], engine.step + 1)
    lease = engine.start([3, 9], [*TOKENS[:6], 90], hits=6)
    assert engine.causes(lease)[4:] == ["kv recomputed"] * 2


def test_blocks_beyond_the_cap_are_not_recorded_and_cost_nothing() -> None:
    engine = Engine(blocks=4)
    lease = engine.start([3, 11], TOKENS[:8])
    engine.compute(lease, 1, range(8))
    engine.cache.let_go(lease, TOKENS[:8])
    hit = engine.start([3, 11, 2], TOKENS[:9], hits=8)
    assert engine.causes(hit) == ["captured"] * 4 + ["kv recomputed"] * 4
    assert engine.cache.nbytes < 4 * B * (L * K + 64) + 200


def test_positions_without_a_block_have_no_place() -> None:
    engine = Engine()
    lease = engine.start([3], TOKENS[:3])
    slots, positions = np.array([lease.slot] * 3 + [40]), np.array([0, 3, 4, 0])
    assert engine.cache.places(slots[:3], positions[:3]).tolist() == [12, 15, -1]
    assert engine.cache.places(slots[3:], positions[3:]).tolist() == [-1]
