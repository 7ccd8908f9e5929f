"""Recurrent layers in the state: snapshots, replays from checkpoints inside a prefill, loud truncation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer as ji
from tests.state.harness import (
    BATCH,
    DENSE,
    KEEPS_ALL,
    LENGTH,
    append,
    assert_same_bits,
    cold_logits,
    empty,
    extend,
    forward_with_aux,
    host_copy,
    model,
    sequences,
)

FAMILY = "qwen3_next"
ROUNDING = 2e-4
COLUMNS = 38  # of a prefill: more than one chunk of the rule


def assert_follows(logits, tokens, lengths):
    """Asserts that `logits[b]` are those after the first `lengths[b]` tokens of a cold pass."""
    cold = cold_logits(tokens, FAMILY)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row], cold[row, length - 1], atol=ROUNDING, rtol=ROUNDING)


def at_lengths(lengths, tokens=None):
    return extend(empty(KEEPS_ALL, FAMILY), sequences() if tokens is None else tokens, lengths, FAMILY)[1]


def prefill(state, at, lengths):
    """Returns (state, checkpoints) after a step of COLUMNS columns with `checkpoint_at=at`."""
    config, params = model(FAMILY)
    inputs = ji.StepInputs(lengths=np.asarray(lengths, np.int32), checkpoint_at=np.asarray(at, np.int32))
    tokens = sequences()[:, :COLUMNS]
    _, state, aux = forward_with_aux(
        params, tokens, state, config=config, inputs=inputs, logits="none", **DENSE
    )
    return state, aux.checkpoints


def test_a_state_holds_no_rows_for_recurrent_layers():
    config, _ = model(FAMILY)
    sizes = config.gated_delta
    state = empty(KEEPS_ALL, FAMILY)
    for layer in state.layers[:3]:
        assert layer.recurrent_state.shape == (
            BATCH,
            sizes.num_value_heads,
            sizes.key_head_dim,
            sizes.value_head_dim,
        )
        assert layer.recurrent_state.dtype == jnp.float32
        assert layer.conv_state.shape == (BATCH, 3, sizes.conv_channels)
    larger = empty(KEEPS_ALL, FAMILY, capacity=4 * LENGTH)
    assert [leaf.shape for leaf in jax.tree.leaves(larger.layers[:3])] == [
        leaf.shape for leaf in jax.tree.leaves(state.layers[:3])
    ]


def test_a_checkpoint_holds_the_states_and_no_row():
    state = at_lengths([9, 30])
    saved = ji.snapshot(state)
    assert saved.layers[3] is None
    for layer, part in zip(state.layers[:3], saved.layers[:3], strict=True):
        np.testing.assert_array_equal(part.recurrent_state, layer.recurrent_state)
        np.testing.assert_array_equal(part.conv_state, layer.conv_state)


def test_a_truncation_is_refused_inside_jit_too():
    state = at_lengths([9, 12])
    assert ji.rollback_floor(state) is None
    for truncate in (ji.truncate, jax.jit(ji.truncate)):
        with pytest.raises(ValueError, match="recurrent layers, which cannot go back"):
            truncate(state, 9)


def test_a_restored_state_goes_on_as_one_that_never_went_further():
    tokens, other = sequences(), sequences(10)
    state = at_lengths([7, 16])
    saved = ji.snapshot(state)
    longer = extend(state, tokens, [30, 40], FAMILY)[1]
    held = host_copy((state, saved, longer))
    back = ji.restore(longer, saved)
    assert np.asarray(back.length).tolist() == [7, 16]
    mixed = np.where(np.arange(LENGTH) < np.array([[7], [16]]), tokens, other)
    logits, after = extend(back, mixed, [29, 20], FAMILY)
    assert_follows(logits, mixed, [29, 20])
    assert np.asarray(after.status).tolist() == [0, 0]
    assert_same_bits((state, saved, longer), held)


def test_a_row_whose_checkpoint_is_further_on_keeps_its_own_state():
    shorter, saved = at_lengths([9, 12]), ji.snapshot(at_lengths([5, 20]))
    with pytest.raises(ValueError, match="is at 20 for row 1, the state only at 12"):
        ji.restore(shorter, saved)
    back = jax.jit(ji.restore)(shorter, saved)
    assert np.asarray(back.length).tolist() == [5, 12]
    assert np.asarray(back.status).tolist() == [0, int(ji.Status.BAD_ROLLBACK)]
    for layer, own, taken in zip(back.layers[:3], shorter.layers, saved.layers, strict=False):
        np.testing.assert_array_equal(layer.recurrent_state[0], taken.recurrent_state[0])
        np.testing.assert_array_equal(layer.conv_state[0], taken.conv_state[0])
        np.testing.assert_array_equal(layer.recurrent_state[1], own.recurrent_state[1])
        np.testing.assert_array_equal(layer.conv_state[1], own.conv_state[1])


@pytest.mark.parametrize("before", [[0, 0], [2, 1]], ids=["from_nothing", "continued"])
def test_checkpoints_inside_a_prefill_are_the_states_of_prefills_that_end_there(before):
    at = [[0, 1, 33, 38, -1], [2, 31, 32, 17, 40]]
    lengths = [38, 33]
    start = at_lengths(before)
    longer, checkpoints = prefill(start, at, lengths)
    ends = np.asarray(longer.length)
    for index, saved in enumerate(checkpoints):
        asked = np.array([row[index] for row in at])
        valid = (asked >= np.array(before)) & (asked <= ends)
        assert np.asarray(saved.valid).tolist() == valid.tolist()
        assert np.asarray(saved.length).tolist() == np.where(valid, asked, -1).tolist()
        columns = np.where(valid, asked - np.array(before), 0)
        alone, _ = prefill(start, [[-1] * 5] * 2, columns)
        for part, layer in zip(saved.layers[:3], alone.layers, strict=False):
            for row in np.flatnonzero(valid):
                np.testing.assert_allclose(
                    part.recurrent_state[row], layer.recurrent_state[row], atol=1e-5, rtol=0
                )
                np.testing.assert_allclose(part.conv_state[row], layer.conv_state[row], atol=1e-5, rtol=0)


def test_a_replay_from_a_checkpoint_inside_a_prefill_equals_a_cold_pass():
    tokens = sequences()
    longer, (saved,) = prefill(empty(KEEPS_ALL, FAMILY), [[11], [34]], [38, 38])
    logits, _ = extend(ji.restore(longer, saved), tokens, [20, 40], FAMILY)
    assert_follows(logits, tokens, [20, 40])


def test_donating_a_restored_state_leaves_its_checkpoint_valid():
    config, params = model(FAMILY)
    donating = jax.jit(
        lambda state, tokens: ji.forward(params, tokens, state, config=config, logits="none", **DENSE)[1],
        donate_argnums=0,
    )
    token = jnp.zeros((BATCH, 1), jnp.int32)
    assert np.asarray(donating(empty(KEEPS_ALL, FAMILY), token).length).tolist() == [1, 1]
    state = at_lengths([9, 14])
    saved = ji.snapshot(state)
    before = host_copy(saved)
    longer = donating(state, token)
    donating(ji.restore(longer, saved), token)
    assert_same_bits(saved, before)


def test_a_decode_step_updates_a_donated_state_in_place():
    config, params = model(FAMILY)
    state = empty(KEEPS_ALL, FAMILY)
    step = jax.jit(
        lambda state, tokens: ji.forward(params, tokens, state, config=config, logits="none")[1],
        donate_argnums=0,
    )
    compiled = step.lower(state, jnp.zeros((BATCH, 1), jnp.int32)).compile()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= held


def test_appends_of_any_sizes_equal_a_cold_pass():
    tokens = sequences()
    state = empty(KEEPS_ALL, FAMILY)
    for counts in ([6, 1], [0, 6], [1, 1], [5, 0], [6, 6]):
        logits, state = append(state, tokens, counts, FAMILY)
    assert_follows(logits, tokens, np.asarray(state.length))
