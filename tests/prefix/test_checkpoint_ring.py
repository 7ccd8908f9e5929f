"""Which checkpoints a slot keeps: rule 29."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.prefix import CheckpointRing, PrefixReuseMode, RingCheckpoint, checkpoint_survives_save
from tests.prefix import oracles

APPEND = PrefixReuseMode.EXACT_APPEND
REPLAY = PrefixReuseMode.REPLAY_FROM_CHECKPOINT
REFILL = PrefixReuseMode.FULL_REFILL


def at(length: int, payload: object = None, *, size_bytes: int = 10) -> RingCheckpoint:
    """A checkpoint of `length` tokens."""
    return RingCheckpoint(length, size_bytes, payload)


def ring_of(*lengths: int, max_count: int = 8, budget_bytes: int = 1000) -> CheckpointRing:
    """A ring that holds checkpoints of these lengths."""
    return CheckpointRing(max_count, budget_bytes, tuple(at(length, "old") for length in lengths))


def kept_of(lengths: list[int], max_count: int, history_len: int) -> tuple[int, ...]:
    """The lengths that an empty ring of `max_count` keeps of checkpoints taken in one turn."""
    taken = [at(length) for length in lengths]
    ring = ring_of(max_count=max_count).after_save(
        REFILL, common_prefix_len=0, new_represented_len=history_len, taken=taken
    )
    return ring.lengths


# On save


@pytest.mark.parametrize("mode", [APPEND, REPLAY, PrefixReuseMode.TRUNCATE_APPEND])
def test_rule_29_checkpoints_inside_the_common_history_survive_a_save(mode):
    ring = ring_of(2, 4, 6, 9).after_save(mode, common_prefix_len=6, new_represented_len=8)
    assert ring.lengths == (2, 4, 6)


def test_rule_29_a_checkpoint_at_the_saved_end_does_not_survive():
    assert ring_of(2, 4).after_save(REPLAY, common_prefix_len=4, new_represented_len=4).lengths == (2,)


def test_rule_29_the_old_boundary_is_promoted():
    ring = ring_of(3).after_save(
        APPEND, common_prefix_len=5, new_represented_len=9, boundary=at(5, "boundary")
    )
    assert ring.lengths == (3, 5)
    assert ring.at(5).payload == "boundary"


def test_rule_29_a_boundary_that_the_saved_history_left_is_not_promoted():
    ring = ring_of(3).after_save(REPLAY, common_prefix_len=4, new_represented_len=9, boundary=at(5))
    assert ring.lengths == (3,)


def test_rule_29_after_a_refill_the_ring_starts_empty():
    ring = ring_of(2, 3).after_save(REFILL, common_prefix_len=5, new_represented_len=9, boundary=at(5))
    assert ring.lengths == ()


def test_rule_29_after_a_refill_only_checkpoints_of_the_new_state_are_held():
    ring = ring_of(2, 3).after_save(REFILL, common_prefix_len=5, new_represented_len=9, taken=[at(4, "new")])
    assert ring.lengths == (4,)


def test_rule_29_the_ring_is_ascending_and_holds_one_a_length_the_newest():
    ring = ring_of(2, 5).after_save(
        APPEND,
        common_prefix_len=5,
        new_represented_len=9,
        boundary=at(5, "boundary"),
        taken=[at(8, "new"), at(2, "new"), at(7, "new")],
    )
    assert ring.lengths == (2, 5, 7, 8)
    assert [checkpoint.payload for checkpoint in ring.checkpoints] == ["new", "boundary", "new", "new"]


def test_a_checkpoint_taken_at_the_saved_end_is_left_to_the_live_state():
    ring = ring_of().after_save(REFILL, common_prefix_len=0, new_represented_len=4, taken=[at(3), at(4)])
    assert ring.lengths == (3,)


def test_a_save_leaves_the_ring_before_it_as_it_was():
    before = ring_of(2, 3)
    before.after_save(REFILL, common_prefix_len=0, new_represented_len=9)
    assert before.lengths == (2, 3)


# Bounds


def test_rule_29_the_ring_never_exceeds_its_count():
    assert len(kept_of(list(range(1, 100)), 5, 100)) == 5


def test_rule_29_the_ring_never_exceeds_its_bytes():
    taken = [at(length, size_bytes=size) for length, size in ((10, 40), (20, 30), (30, 30), (40, 20))]
    ring = CheckpointRing(8, 80).after_save(REFILL, common_prefix_len=0, new_represented_len=50, taken=taken)
    assert ring.size_bytes <= 80
    assert ring.lengths == (20, 30, 40)


def test_rule_29_of_two_that_cover_alike_the_larger_goes():
    # Each alone would serve nearly as well: what decides is the bytes that dropping one frees.
    taken = [at(500, size_bytes=10), at(501, size_bytes=90)]
    ring = CheckpointRing(8, 95).after_save(
        REFILL, common_prefix_len=0, new_represented_len=1000, taken=taken
    )
    assert ring.lengths == (500,)


def test_a_checkpoint_larger_than_the_budget_pushes_nothing_out():
    taken = [at(10, size_bytes=40), at(30, size_bytes=101)]
    ring = CheckpointRing(8, 100).after_save(REFILL, common_prefix_len=0, new_represented_len=50, taken=taken)
    assert ring.lengths == (10,)


@pytest.mark.parametrize(("max_count", "budget_bytes"), [(0, 100), (3, 0), (3, 9)])
def test_a_ring_without_room_holds_nothing(max_count, budget_bytes):
    ring = CheckpointRing(max_count, budget_bytes)
    assert ring.after_save(REFILL, common_prefix_len=0, new_represented_len=9, taken=[at(3)]).lengths == ()


# Coverage


@pytest.mark.parametrize("max_count", [2, 3])
def test_rule_29_thinned_turn_by_turn_the_ring_covers_more_than_the_newest_few(max_count):
    ring = ring_of(max_count=max_count)
    for saved_len in range(20, 210, 10):
        boundary = at(saved_len - 10)
        ring = ring.after_save(
            APPEND, common_prefix_len=saved_len - 10, new_represented_len=saved_len, boundary=boundary
        )
        offered = tuple(range(10, saved_len, 10))
        if len(offered) > max_count:
            best = oracles.least_expected_replay(offered, max_count, saved_len)
            assert oracles.expected_replay(ring.lengths, saved_len) <= 1.25 * best
    newest = offered[-max_count:]
    assert oracles.expected_replay(ring.lengths, 200) < 0.7 * oracles.expected_replay(newest, 200)


def test_rule_29_what_remains_lies_denser_towards_the_end():
    lengths = (0, *kept_of(list(range(10, 1000, 10)), 6, 1000), 1000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(lengths)]
    assert gaps == sorted(gaps, reverse=True)


def test_the_choice_expects_at_most_a_fifth_more_replay_than_the_best_choice_there_is():
    lengths = [7, 20, 33, 34, 51, 60, 78, 80, 91, 97, 99]
    for count in range(1, len(lengths)):
        kept = kept_of(lengths, count, 100)
        best = oracles.least_expected_replay(tuple(lengths), count, 100)
        assert oracles.expected_replay(kept, 100) <= 1.2 * best


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(1, 59), min_size=2, max_size=8), st.integers(60, 70))
def test_the_first_to_go_is_the_one_whose_loss_adds_least_replay(lengths, history_len):
    ascending = sorted(lengths)
    kept = kept_of(ascending, len(ascending) - 1, history_len)
    best = oracles.least_expected_replay(tuple(ascending), len(ascending) - 1, history_len)
    assert oracles.expected_replay(kept, history_len) == pytest.approx(best)


@settings(deadline=None)
@given(
    st.sets(st.integers(1, 30)),
    st.integers(0, 30),
    st.integers(1, 30),
    st.integers(0, 30),
    st.sampled_from(list(PrefixReuseMode)),
    st.integers(0, 4),
)
def test_a_save_holds_survivors_only_within_the_bounds(lengths, old_len, new_len, common, mode, max_count):
    common = min(common, new_len)
    ring = ring_of(*sorted(lengths), max_count=40).after_save(
        mode,
        common_prefix_len=common,
        new_represented_len=new_len,
        boundary=at(old_len) if old_len else None,
    )
    survivors = {n for n in lengths | {old_len} if checkpoint_survives_save(n, common, new_len)}
    assert ring.lengths == (() if mode is REFILL else tuple(sorted(survivors)))
    thinner = CheckpointRing(max_count, 10 * max_count).after_save(
        APPEND, common_prefix_len=new_len, new_represented_len=new_len, taken=ring.checkpoints
    )
    assert set(thinner.lengths) <= set(ring.lengths)
    assert len(thinner.lengths) == min(max_count, len(ring.lengths))


# Refused input


def test_a_length_that_is_not_held_is_refused():
    with pytest.raises(ValueError, match=r"CheckpointRing\.at\(length=4\) must be one of the lengths held"):
        ring_of(3, 5).at(4)


@pytest.mark.parametrize(("length", "size_bytes"), [(0, 1), (-1, 1), (1, 0), (1.5, 1), (True, 1)])
def test_a_checkpoint_of_nothing_is_refused(length, size_bytes):
    with pytest.raises(ValueError, match=r"RingCheckpoint\((length|size_bytes)=\.\.\.\) must be"):
        RingCheckpoint(length, size_bytes, None)


@pytest.mark.parametrize("lengths", [(3, 2), (2, 2)])
def test_a_ring_made_out_of_order_is_refused(lengths):
    with pytest.raises(ValueError, match="must be ascending"):
        ring_of(*lengths)


@pytest.mark.parametrize("bounds", [{"max_count": 1}, {"budget_bytes": 19}], ids=str)
def test_a_ring_made_beyond_its_bounds_is_refused(bounds):
    with pytest.raises(ValueError, match="bytes together; got 2 of 20 bytes; add them with after_save"):
        ring_of(2, 3, **bounds)


def test_a_save_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match=r"must cover what was saved; got common_prefix_len=6"):
        ring_of(2).after_save(APPEND, common_prefix_len=6, new_represented_len=5)
    with pytest.raises(ValueError, match=r"taken lengths \[6\]"):
        ring_of(2).after_save(APPEND, common_prefix_len=2, new_represented_len=5, taken=[at(6)])
    with pytest.raises(
        ValueError, match=r"after_save\(mode=\.\.\.\) must be a PrefixReuseMode; got 'full_refill'"
    ):
        ring_of(2).after_save("full_refill", common_prefix_len=2, new_represented_len=5)
