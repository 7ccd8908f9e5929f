"""Slots side by side: what a turn opens, what it leaves when it breaks off, and who makes room for whom.

States here are empty buffers with a length: the store looks at tokens, lengths and bytes only.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.prefix.store import ring_checkpoint, state_bytes
from jaxinfer.testing import tiny_config
from tests.prefix.builders import METADATA

FULL, EXACT = ji.PrefixReuseMode.FULL_REFILL, ji.PrefixReuseMode.EXACT_APPEND
TRUNCATE = ji.PrefixReuseMode.TRUNCATE_APPEND
ON, OFF = ji.KvWindowPolicy.on(), ji.KvWindowPolicy.off()


def state_of(length: int = 0, policy: ji.KvWindowPolicy = OFF) -> ji.DecodeState:
    state = ji.init_state(tiny_config("gemma3", window=4), capacity=32, max_append=2, kv_window=policy)
    return state.replace(length=jnp.array([length], jnp.int32))


STATE_BYTES = state_bytes(state_of())


def opened(store, slot, ids, metadata=METADATA, policy=OFF):
    return store.open(slot, metadata, ids, fresh=lambda: state_of(policy=policy))


def take_turn(store, slot, ids, *, metadata=METADATA, policy=OFF, taken=()):
    """A turn that ends with exactly `ids` represented; returns its plan."""
    turn = opened(store, slot, ids, metadata, policy)
    assert np.asarray(turn.state.length).tolist() == [turn.plan.suffix_start]
    store.save(turn, metadata, ids, state_of(len(ids), policy), max_checkpoints=3, taken=taken)
    return turn.plan


def test_rule_25_slots_never_see_each_others_state():
    store = ji.PrefixStore(10 * STATE_BYTES)
    take_turn(store, "a", [1, 2, 3])
    assert take_turn(store, "b", [1, 2, 3, 4]).mode is FULL
    plan = take_turn(store, "a", [1, 2, 3, 9])
    assert (plan.mode, plan.reusable_len) == (EXACT, 3)
    assert store.slots["b"].entry.token_ids == (1, 2, 3, 4)


def test_rule_25_the_least_recently_used_slot_makes_room():
    store = ji.PrefixStore(2 * STATE_BYTES)
    take_turn(store, "a", [1, 2])
    take_turn(store, "b", [1, 2])
    assert take_turn(store, "a", [1, 2, 3]).mode is EXACT
    take_turn(store, "c", [1, 2])
    assert set(store.slots) == {"a", "c"}
    assert store.size_bytes <= store.budget_bytes
    assert take_turn(store, "a", [1, 2, 3, 4]).mode is EXACT


def test_checkpoints_of_another_slot_make_room_before_its_state_does():
    saved = ring_checkpoint(ji.snapshot(state_of(2, ON)))
    state = state_bytes(state_of(policy=ON))
    store = ji.PrefixStore(2 * state + saved.size_bytes // 2)
    take_turn(store, "a", [1, 2, 3], policy=ON, taken=[saved])
    assert store.slots["a"].ring.lengths == (2,)
    take_turn(store, "b", [1, 2, 3], policy=ON)
    assert store.slots["a"].ring.lengths == ()
    assert store.size_bytes == 2 * state


def test_fault_13_a_slot_is_refilled_for_another_adapter_or_the_same_one_with_other_weights():
    store = ji.PrefixStore(10 * STATE_BYTES)
    for fingerprint in (None, "weights of a", "weights of b", "other weights of a", None):
        metadata = dataclasses.replace(METADATA, adapter_fingerprint=fingerprint)
        plan = take_turn(store, 0, [1, 2, 3], metadata=metadata)
        assert (plan.mode, plan.reusable_len) == (FULL, 0)


def test_fault_14_the_same_prompt_again_goes_on_from_one_token_less():
    store = ji.PrefixStore(10 * STATE_BYTES)
    take_turn(store, 0, [1, 2, 3])
    plan = take_turn(store, 0, [1, 2, 3])
    assert (plan.mode, plan.suffix_start, plan.suffix_len) == (TRUNCATE, 2, 1)


@pytest.mark.parametrize("ids", [[1, 2, 3, 4], [1, 2], [9]], ids=["append", "truncate", "refill"])
@pytest.mark.parametrize("room", [1, 2], ids=["tight", "roomy"])
def test_rule_27_a_turn_that_never_ends_leaves_its_slot_as_it_was_or_empty(ids, room):
    store = ji.PrefixStore(room * STATE_BYTES)
    take_turn(store, 0, [1, 2, 3])
    before = store.slots
    turn = opened(store, 0, ids)
    step = jax.jit(lambda state: state.replace(length=state.length + 1), donate_argnums=0)
    if turn.donate:
        step(turn.state)
    if room == 1:
        assert turn.donate
        assert not store.slots
        assert take_turn(store, 0, [1, 2, 3, 4]).mode is FULL
    else:
        assert store.slots == before
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(store.slots[0].state))
        assert take_turn(store, 0, [1, 2, 3, 4]).mode is EXACT


def test_a_state_larger_than_the_budget_is_refused_before_anything_is_computed():
    store = ji.PrefixStore(STATE_BYTES - 1)
    with pytest.raises(ValueError, match=rf"{STATE_BYTES - 1}\) cannot hold slot 'a' of {STATE_BYTES} bytes"):
        opened(store, "a", [1, 2])


@pytest.mark.parametrize("budget_bytes", [0, -1, True, 1.5])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget_bytes):
    with pytest.raises(ValueError, match=r"PrefixStore\(budget_bytes=\.\.\.\)"):
        ji.PrefixStore(budget_bytes)
