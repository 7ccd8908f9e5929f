"""Checkpoints: what they carry, and that a restored state goes on as one that never went further."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxinfer as ji
from tests.state.harness import (
    BATCH,
    DENSE,
    EVICTS,
    EVICTS_SHORT,
    KEEPS_ALL,
    LAYOUTS,
    LENGTH,
    PREFILL,
    WINDOW,
    append,
    assert_follows,
    assert_same_bits,
    empty,
    extend,
    forward_with_aux,
    host_copy,
    model,
    sequences,
)

LENGTHS = st.lists(st.integers(0, LENGTH), min_size=BATCH, max_size=BATCH)
jitted_restore = jax.jit(ji.restore)


def prefill(layout, at, lengths, state=None, **inputs):
    """Returns (state, checkpoints) after a step of PREFILL columns with `checkpoint_at=at`."""
    family = "gemma3_image" if "is_image" in inputs else "gemma3"
    config, params = model(family)
    state = empty(layout, family) if state is None else state
    start = np.asarray(state.length)[:, None] + np.arange(PREFILL)
    tokens = np.take_along_axis(sequences(), np.minimum(start, LENGTH - 1), axis=1)
    step = ji.StepInputs(
        lengths=np.asarray(lengths, np.int32), checkpoint_at=np.asarray(at, np.int32), **inputs
    )
    _, state, aux = forward_with_aux(
        params, tokens, state, config=config, inputs=step, logits="none", **DENSE
    )
    return state, aux.checkpoints


# Rule 41: what it carries


def test_rule_41_a_checkpoint_of_layers_that_keep_all_rows_holds_no_row():
    state = extend(empty(KEEPS_ALL), sequences(), [9, 30])[1]
    saved = ji.snapshot(state)
    assert saved.layers == (None, None, None)
    assert {leaf.shape for leaf in jax.tree.leaves(saved)} == {(BATCH,)}
    assert saved.size_bytes == BATCH * (4 + 1)  # length and valid


def test_restoring_layers_that_keep_all_rows_copies_none():
    state = extend(empty(KEEPS_ALL), sequences(), [5, 5])[1]
    longer = extend(state, sequences(), [9, 14])[1]
    back = ji.restore(longer, ji.snapshot(state))
    for old, new in zip(longer.layers, back.layers, strict=True):
        assert new.key.unsafe_buffer_pointer() == old.key.unsafe_buffer_pointer()
        assert new.value.unsafe_buffer_pointer() == old.value.unsafe_buffer_pointer()


def test_rule_41_a_checkpoint_holds_the_last_window_less_one_rows_of_each_evicting_layer():
    config, _ = model()
    state = extend(empty(EVICTS), sequences(), [2, 30])[1]
    saved = ji.snapshot(state)
    assert saved.layers[2] is None
    rows = (BATCH, config.num_kv_heads, WINDOW - 1, config.head_dim)
    assert [leaf.shape for leaf in jax.tree.leaves(saved.layers)] == [rows] * 4
    for layer, part in zip(state.layers[:2], saved.layers[:2], strict=True):
        base = np.asarray(layer.base)
        np.testing.assert_array_equal(part.key[0, :, :2], layer.key[0, :, :2])
        last = slice(30 - (WINDOW - 1) - base[1], 30 - base[1])
        np.testing.assert_array_equal(part.key[1], layer.key[1, :, last])
        np.testing.assert_array_equal(part.value[1], layer.value[1, :, last])


def test_a_window_of_one_has_nothing_to_save():
    config = ji.ModelConfig(**{**vars(model()[0]), "layers": one_key_layers()})
    state = ji.init_state(config, capacity=8, max_append=2, kv_window=ji.KvWindowPolicy.on())
    saved = ji.snapshot(state)
    assert saved.size_bytes == 4 + 1
    assert np.asarray(ji.restore(state, saved).length).tolist() == [0]


def one_key_layers():
    layers = model()[0].layers
    return tuple(ji.LayerConfig(layer.kind, window=1, rope=layer.rope) for layer in layers[:2])


# Restored states


@given(lengths=LENGTHS, further=LENGTHS, more=LENGTHS, seed=st.integers(0, 3))
@settings(deadline=None, max_examples=8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_restored_state_goes_on_as_one_that_never_went_further(layout, lengths, further, more, seed):
    tokens, other = sequences(seed), sequences(seed + 10)
    saved = ji.snapshot(extend(empty(layout), tokens, lengths)[1])
    _, longer = extend(empty(layout), tokens, np.maximum(lengths, further))
    back = ji.restore(longer, saved)
    assert np.asarray(back.length).tolist() == lengths
    mixed = np.where(np.arange(LENGTH) < np.asarray(lengths)[:, None], tokens, other)
    more = np.maximum(more, lengths)
    logits, after = extend(back, mixed, more)
    assert_follows(logits, mixed, np.where(more > lengths, more, 0))
    assert np.asarray(after.status).tolist() == [0, 0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_restored_state_decodes_the_same_tokens(layout):
    def greedy(state, logits, count):
        chosen = []
        for _ in range(count):
            token = np.argmax(logits, -1)
            chosen.append(token.tolist())
            step = np.zeros((BATCH, LENGTH + count), np.int32)
            step[np.arange(BATCH), np.asarray(state.length)] = token
            logits, state = append(state, step, [1, 1], width=1)
        return chosen, state

    logits, state = extend(empty(layout), sequences(), [11, 17])
    saved = ji.snapshot(state)
    straight, longer = greedy(state, logits, 12)
    again, _ = greedy(ji.restore(longer, saved), logits, 12)
    assert again == straight


def test_a_restored_state_can_be_truncated_where_its_rows_allow():
    state = extend(empty(EVICTS), sequences(), [3, 30])[1]
    longer = extend(state, sequences(), [30, 40])[1]
    back = ji.restore(longer, ji.snapshot(state))
    assert np.asarray(ji.rollback_floor(back)).tolist() == [0, 30]


def test_restoring_needs_no_more_than_the_checkpoint_and_an_appended_state():
    """A second restore from the same checkpoint, after the first restored state went another way."""
    tokens = sequences()
    state = extend(empty(EVICTS), tokens, [9, 9])[1]
    saved = ji.snapshot(state)
    first = extend(ji.restore(extend(state, tokens, [30, 30])[1], saved), sequences(5), [25, 25])[1]
    logits, _ = extend(ji.restore(first, saved), tokens, [20, 20])
    assert_follows(logits, tokens, [20, 20])


# Loud


def test_a_state_shorter_than_the_checkpoint_is_refused():
    longer = extend(empty(EVICTS), sequences(), [9, 20])[1]
    shorter = extend(empty(EVICTS), sequences(), [9, 12])[1]
    saved = ji.snapshot(longer)
    with pytest.raises(ValueError, match=r"is at 20 for row 1, the state only at 12"):
        ji.restore(shorter, saved)
    before = host_copy(shorter.layers)
    back = jitted_restore(shorter, saved)
    assert np.asarray(back.length).tolist() == [9, 12]
    assert np.asarray(back.status).tolist() == [0, int(ji.Status.BAD_ROLLBACK)]
    for leaf, copy in zip(jax.tree.leaves(back.layers), before, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[1], copy[1])  # the refused row
    logits, _ = append(back, sequences(), [1, 1])
    assert_follows(logits, sequences(), [10, 0])
    assert np.isnan(logits[1]).all()


def test_a_checkpoint_of_another_layout_is_refused():
    state = empty(EVICTS)
    config, _ = model()
    others = (
        empty(KEEPS_ALL),
        ji.init_state(config, batch=3, capacity=48, max_append=6, kv_window=ji.KvWindowPolicy.on()),
        ji.init_state(config, batch=2, capacity=48, max_append=6, kv_window=EVICTS.policy, dtype="bfloat16"),
        empty(EVICTS, "mistral"),
    )
    for other in others:
        with pytest.raises(ValueError, match="not of a state like this one"):
            ji.restore(state, ji.snapshot(other))


# Checkpoints inside a step


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_checkpoints_inside_a_prefill_restore_what_a_cold_pass_gives(layout):
    tokens = sequences()
    at = [[0, 5, -1, 11], [12, 3, 8, 30]]
    state, checkpoints = prefill(layout, at, [12, 12])
    assert [np.asarray(c.valid).tolist() for c in checkpoints] == [
        [True, True],
        [True, True],
        [False, True],
        [True, False],
    ]
    assert [np.asarray(c.length).tolist() for c in checkpoints] == [[0, 12], [5, 3], [-1, 8], [11, -1]]
    longer = extend(state, tokens, [LENGTH, 31])[1]
    for saved in checkpoints[:2]:
        back = ji.restore(longer, saved)
        assert np.asarray(back.length).tolist() == np.asarray(saved.length).tolist()
        logits, _ = extend(back, tokens, [20, 19])
        assert_follows(logits, tokens, [20, 19])
    for saved, row in ((checkpoints[2], 0), (checkpoints[3], 1)):
        with pytest.raises(ValueError, match=f"holds nothing for row {row}"):
            ji.restore(longer, saved)
        back = jitted_restore(longer, saved)
        assert np.asarray(back.length)[row] == np.asarray(longer.length)[row]
        assert np.asarray(back.status)[row] == int(ji.Status.BAD_ROLLBACK)
        assert np.asarray(back.status)[1 - row] == 0


@pytest.mark.parametrize("layout", [EVICTS, EVICTS_SHORT], ids=str)
def test_the_same_lengths_asked_of_every_chunk_fall_into_one_each(layout):
    at = [[4, 12, 15], [7, 13, 24]]
    state, first = prefill(layout, at, [12, 12])
    state, second = prefill(layout, at, [4, 12], state)
    assert np.asarray([c.valid for c in first]).tolist() == [[True, True], [True, False], [False, False]]
    assert np.asarray([c.valid for c in second]).tolist() == [[False, False], [True, True], [True, True]]
    logits, _ = extend(ji.restore(state, second[2]), sequences(), [22, 30])
    assert_follows(logits, sequences(), [22, 30])
    saved = ji.snapshot(state)
    np.testing.assert_array_equal(second[2].layers[0].key[1], saved.layers[0].key[1])  # at the step's end


def test_no_checkpoint_is_taken_inside_an_image_run():
    flags = np.zeros((BATCH, PREFILL), bool)
    flags[0, 2:6] = True
    flags[1, 8:11] = True
    at = [[2, 3, 5, 6], [8, 9, 10, 11]]
    state, checkpoints = prefill(EVICTS, at, [12, 12], is_image=flags)
    assert np.asarray([c.valid for c in checkpoints]).tolist() == [
        [True] * 2,
        [False] * 2,
        [False] * 2,
        [True] * 2,
    ]
    back = ji.restore(state, checkpoints[3])
    assert np.asarray(back.ends_in_image).tolist() == [True, True]
    assert np.asarray(ji.restore(state, checkpoints[0]).ends_in_image).tolist() == [False, False]


def test_a_checkpoint_before_an_image_brings_its_own_rope_delta():
    config, params = model("qwen3_vl")
    row = [(p, p, p) for p in range(3)] + [(3, 3, 3), (3, 3, 4), (3, 4, 3), (3, 4, 4)]
    row += [(p, p, p) for p in range(5, 10)]
    positions = np.stack([np.array(row).T] * BATCH, axis=1).astype(np.int32)
    flags = np.zeros((BATCH, PREFILL), bool)
    flags[:, 3:7] = True
    inputs = ji.StepInputs(
        positions=positions, is_image=flags, checkpoint_at=np.array([[3, 7], [2, 9]], np.int32)
    )
    _, state, aux = forward_with_aux(
        params, sequences()[:, :PREFILL], empty(KEEPS_ALL, "qwen3_vl"), config=config, inputs=inputs, **DENSE
    )
    before, after = aux.checkpoints
    assert np.asarray(before.rope_delta).tolist() == [0, 0]
    assert np.asarray(after.rope_delta).tolist() == [-2, -2]
    back = ji.restore(state, before)
    assert np.asarray(ji.rollback_floor(back)).tolist() == [0, 0]
    logits, _ = append(back, sequences(), [4, 4], "qwen3_vl")
    assert_follows(logits, sequences(), [7, 6], "qwen3_vl")
    assert np.asarray(ji.rollback_floor(ji.restore(state, after))).tolist() == [7, 7]
    assert np.asarray(ji.rollback_floor(state)).tolist() == [7, 7]


def test_without_lengths_there_are_no_checkpoints_and_forward_takes_none():
    config, params = model()
    tokens = sequences()[:, :PREFILL]
    wanted = ji.StepInputs(checkpoint_at=np.zeros((BATCH, 1), np.int32))
    with pytest.raises(ValueError, match="gives no checkpoints; call forward_with_aux"):
        ji.forward(params, tokens, empty(EVICTS), config=config, inputs=wanted)
    with pytest.raises(ValueError, match="needs a state"):
        ji.forward_with_aux(params, tokens, config=config, inputs=wanted)
    bad = ji.StepInputs(checkpoint_at=np.full((BATCH, 1), -2, np.int32))
    with pytest.raises(ValueError, match=r"must be lengths, or -1 for none; got -2"):
        ji.forward_with_aux(params, tokens, empty(EVICTS), config=config, inputs=bad)
    shapes = jax.eval_shape(
        lambda state: ji.forward_with_aux(params, jnp.asarray(tokens), state, config=config), empty(EVICTS)
    )
    assert shapes[2] == ji.Aux(checkpoints=())


# Values


def test_rule_42_snapshot_restore_and_truncate_change_nothing_that_the_caller_holds():
    state = extend(empty(EVICTS), sequences(), [9, 14])[1]
    saved = ji.snapshot(state)
    longer = extend(state, sequences(), [20, 33])[1]
    held = (state, saved, longer)
    before = host_copy(held)
    back = ji.restore(longer, saved)
    extend(back, sequences(5), [20, 20])
    branch = ji.truncate(longer, longer.length - 1)
    extend(branch, sequences(5), [22, 36])
    assert_same_bits(held, before)
    logits, _ = append(longer, sequences(), [1, 1])
    assert_follows(logits, sequences(), [21, 34])


@pytest.mark.parametrize("layout", [KEEPS_ALL, EVICTS], ids=str)
def test_fault_29_a_checkpoint_and_its_state_own_their_buffers(layout):
    """Donating either leaves the other valid; so do steps from one state twice."""
    config, params = model()
    donating = jax.jit(
        lambda state, tokens: ji.forward(params, tokens, state, config=config, logits="none", **DENSE)[1],
        donate_argnums=0,
    )
    token = jnp.zeros((BATCH, 1), jnp.int32)
    fresh = donating(empty(layout), token)  # no buffer is donated twice
    assert np.asarray(fresh.length).tolist() == [1, 1]
    state = extend(empty(layout), sequences(), [9, 14])[1]
    saved = ji.snapshot(state)
    before = host_copy(saved)
    longer = donating(state, token)
    assert_same_bits(saved, before)
    restored = ji.restore(longer, saved)
    donating(restored, token)
    assert_same_bits(saved, before)


def test_fault_29_two_steps_from_one_state_are_both_right():
    tokens = sequences()
    state = extend(empty(EVICTS), tokens, [9, 14])[1]
    before = host_copy(state)
    for _ in range(2):
        logits, _ = append(state, tokens, [5, 6])
        assert_follows(logits, tokens, [14, 20])
    assert_same_bits(state, before)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_checkpoints_of_a_donated_step_are_valid(layout):
    config, params = model()

    def run(state, tokens):
        inputs = ji.StepInputs(checkpoint_at=jnp.array([[5], [12]], jnp.int32))
        _, state, aux = ji.forward_with_aux(
            params, tokens, state, config=config, inputs=inputs, logits="none", **DENSE
        )
        return state, aux

    state, aux = jax.jit(run, donate_argnums=0)(empty(layout), jnp.asarray(sequences()[:, :PREFILL]))
    logits, _ = extend(ji.restore(state, aux.checkpoints[0]), sequences(), [15, 15])
    assert_follows(logits, sequences(), [15, 15])
