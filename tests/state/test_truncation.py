"""Going back to an earlier length: exact where rows allow it, refused where they do not."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxinfer as ji
from jaxinfer.state import WindowedKV
from tests.state.harness import (
    BATCH,
    DENSE,
    EVICTS,
    KEEPS_ALL,
    LAYOUTS,
    LENGTH,
    PREFILL,
    append,
    assert_follows,
    empty,
    extend,
    forward,
    live_rows,
    model,
    sequences,
)

LENGTHS = st.lists(st.integers(0, LENGTH), min_size=BATCH, max_size=BATCH)
jitted_truncate = jax.jit(ji.truncate)


def floors(state: ji.DecodeState) -> list[int]:
    return np.asarray(ji.rollback_floor(state)).tolist()


# Rule 39: what is allowed


def windowed_state(window: ji.KvWindow, base: int, length: int) -> ji.DecodeState:
    """A state of one sliding layer, at `length` with rows from `base` on."""
    key, value = jnp.zeros((1, 1, 16, 4)), jnp.ones((1, 1, 16, 4))
    layer = WindowedKV(key, value, jnp.array([base], jnp.int32), window, 16)
    return ji.DecodeState(
        layers=(layer,),
        length=jnp.array([length], jnp.int32),
        status=jnp.zeros(1, jnp.int32),
        image_columns=None,
        rope_delta=None,
        image_end=None,
        capacity=None,
    )


def test_rule_39_a_worked_refusal():
    window = ji.KvWindow(8, 3)
    assert window.rows_after(50) == 10
    state = windowed_state(window, base=40, length=50)
    assert floors(state) == [47]
    for target in (0, 39, 40, 46):
        with pytest.raises(ValueError, match=rf"length={target}.*row 0 holds 50 .*go back to 47 at least"):
            ji.truncate(state, target)
    for target in (47, 48, 50):
        assert np.asarray(ji.truncate(state, target).length).tolist() == [target]


@pytest.mark.parametrize(
    "window", [ji.KvWindow(1, 0), ji.KvWindow(1, 2), ji.KvWindow(5, 0), ji.KvWindow(8, 3)]
)
def test_rule_39_a_target_is_allowed_iff_enough_rows_before_it_are_resident(window):
    for length in range(26):
        base = length - window.rows_after(length)
        state = windowed_state(window, base, length)
        for target in range(length + 1):
            resident_before = target - base
            allowed = target >= base and resident_before >= min(target, window.window - 1)
            got = jitted_truncate(state, target)
            assert np.asarray(got.status).tolist() == [0 if allowed else int(ji.Status.BAD_ROLLBACK)]
            assert np.asarray(got.length).tolist() == [target if allowed else length]


def test_the_floor_is_zero_until_a_row_was_evicted():
    tokens = sequences()
    _, state = extend(empty(EVICTS), tokens, [6, 7])  # window 4, slack 2
    assert floors(state) == [0, 3 + 3]
    assert floors(empty(EVICTS)) == [0, 0]
    assert floors(extend(empty(KEEPS_ALL), tokens, [LENGTH, 5])[1]) == [0, 0]


# What a truncated state gives


@given(lengths=LENGTHS, targets=LENGTHS, more=LENGTHS, seed=st.integers(0, 3))
@settings(deadline=None, max_examples=8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rollback_then_extend_is_a_fresh_sequence(layout, lengths, targets, more, seed):
    tokens, other = sequences(seed), sequences(seed + 10)
    _, state = extend(empty(layout), tokens, lengths)
    targets = np.clip(targets, floors(state), lengths)
    back = ji.truncate(state, targets.astype(np.int32))
    assert np.asarray(back.length).tolist() == targets.tolist()
    mixed = np.where(np.arange(LENGTH) < targets[:, None], tokens, other)
    more = np.maximum(more, targets)
    logits, after = extend(back, mixed, more)
    assert_follows(logits, mixed, np.where(more > targets, more, 0))
    assert np.asarray(after.status).tolist() == [0, 0]


def test_a_truncation_holds_the_rows_of_a_shorter_state():
    tokens = sequences()
    _, longer = extend(empty(KEEPS_ALL), tokens, [20, 20])
    _, shorter = extend(empty(KEEPS_ALL), tokens, [9, 14])
    back = ji.truncate(longer, jnp.array([9, 14], jnp.int32))
    for got, wanted in zip(live_rows(back), live_rows(shorter), strict=True):
        for row in range(BATCH):
            np.testing.assert_allclose(got[row], wanted[row], atol=1e-5)


def test_a_truncation_copies_no_rows():
    _, state = extend(empty(EVICTS), sequences(), [5, 5])
    back = ji.truncate(state, 3)
    for old, new in zip(state.layers, back.layers, strict=True):
        assert new.key.unsafe_buffer_pointer() == old.key.unsafe_buffer_pointer()
        assert new.value.unsafe_buffer_pointer() == old.value.unsafe_buffer_pointer()


# Loud


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_refused_row_is_named_with_target_and_floor(layout):
    _, state = extend(empty(layout), sequences(), [5, 30])
    with pytest.raises(ValueError, match=r"length=6\): row 0 holds 5 positions and cannot get longer"):
        ji.truncate(state, 6)
    with pytest.raises(ValueError, match="row 0 holds 5 positions and can go back to 0 at least"):
        ji.truncate(state, np.array([-1, 30], np.int32))
    if layout is not KEEPS_ALL:
        floor = floors(state)[1]
        assert floor > 20
        with pytest.raises(ValueError, match=rf"length={floor - 1}\): row 1 .* back to {floor} at least"):
            ji.truncate(state, np.array([5, floor - 1], np.int32))


@pytest.mark.parametrize(
    "length", [3.0, True, "3", None, np.zeros(3, np.int32), np.zeros(2, np.float32), 2**40]
)
def test_a_length_of_another_kind_is_refused(length):
    with pytest.raises(ValueError, match=r"truncate\(length=\.\.\.\) must be an int or int32 \[2\]"):
        ji.truncate(empty(EVICTS), length)


def test_inside_jit_a_refused_row_keeps_its_length_and_is_marked_for_good():
    tokens = sequences()
    _, state = extend(empty(EVICTS), tokens, [20, 20])
    floor = floors(state)[0]
    back = jitted_truncate(state, jnp.array([floor - 1, floor], jnp.int32))
    assert np.asarray(back.length).tolist() == [20, floor]
    assert np.asarray(back.status).tolist() == [int(ji.Status.BAD_ROLLBACK), 0]
    logits, later = append(back, tokens, [1, 1])
    assert np.isnan(logits[0]).all()
    assert_follows(logits, tokens, [0, floor + 1])
    assert np.asarray(jitted_truncate(later, 20).status).tolist()[0] == int(ji.Status.BAD_ROLLBACK)


def test_truncation_works_under_vmap():
    _, state = extend(empty(KEEPS_ALL), sequences(), [20, 20])
    targets = jnp.array([[3, 20], [21, 0]], jnp.int32)
    back = jax.vmap(ji.truncate, in_axes=(None, 0))(state, targets)
    assert np.asarray(back.length).tolist() == [[3, 20], [20, 0]]
    assert np.asarray(back.status).tolist() == [[0, 0], [int(ji.Status.BAD_ROLLBACK), 0]]


@flax.struct.dataclass
class Recurrent:
    """The least that a recurrent layer needs: one number a row, the sum of what was fed."""

    total: jax.Array

    def rollback_floor(self) -> None:
        return None

    def checkpoint(self, length: jax.Array) -> Any:
        return jnp.copy(self.total)

    def restore(self, saved: Any, length: jax.Array, allowed: jax.Array) -> Recurrent:
        return Recurrent(jnp.where(allowed, saved, self.total))


def with_recurrent_layer(state: ji.DecodeState) -> ji.DecodeState:
    return state.replace(layers=(*state.layers, Recurrent(jnp.arange(2.0))))


def test_a_state_with_recurrent_layers_cannot_be_truncated():
    state = with_recurrent_layer(extend(empty(KEEPS_ALL), sequences(), [5, 5])[1])
    assert ji.rollback_floor(state) is None
    for truncate in (ji.truncate, jitted_truncate):
        with pytest.raises(ValueError, match="recurrent layers, which cannot go back"):
            truncate(state, 4)


def test_a_state_with_recurrent_layers_is_restored():
    state = with_recurrent_layer(extend(empty(EVICTS), sequences(), [5, 9])[1])
    saved = ji.snapshot(state)
    _, longer = extend(state.replace(layers=state.layers[:-1]), sequences(), [20, 20])
    longer = longer.replace(layers=(*longer.layers, Recurrent(jnp.full(2, -1.0))))
    back = ji.restore(longer, saved)
    assert back.layers[-1].total.tolist() == [0.0, 1.0]
    assert np.asarray(back.length).tolist() == [5, 9]


# Image runs that are read in both directions


def image_state(layout: Any) -> ji.DecodeState:
    """Row 0: text, a run at 2..4, text, a run at 6..7, text to 10; row 1: text and a run at 3..5, its end."""
    config, params = model("gemma3_image")
    flags = np.zeros((BATCH, PREFILL), bool)
    flags[0, [2, 3, 4, 6, 7]] = True
    flags[1, [3, 4, 5]] = True
    inputs = ji.StepInputs(lengths=np.array([11, 6], np.int32), is_image=flags)
    tokens = sequences()[:, :PREFILL]
    state = empty(layout, "gemma3_image")
    return forward(params, tokens, state, config=config, inputs=inputs, logits="all", **DENSE)[1]


def test_a_truncation_inside_an_image_run_is_refused_and_at_its_ends_is_not():
    state = image_state(KEEPS_ALL)
    assert np.asarray(state.ends_in_image).tolist() == [False, True]
    for row_0, row_1 in ((3, 6), (4, 6), (7, 6), (11, 4), (11, 5)):
        target = np.array([row_0, row_1], np.int32)
        with pytest.raises(ValueError, match="has an image run across that length"):
            ji.truncate(state, target)
    ends = {0: False, 2: False, 5: True, 6: False, 8: True, 9: False, 11: False}
    for target, ends_in_image in ends.items():
        back = ji.truncate(state, np.array([target, 3], np.int32))
        assert np.asarray(back.ends_in_image).tolist() == [ends_in_image, False]


def test_after_a_truncation_a_run_may_not_be_continued_but_begun():
    config, params = model("gemma3_image")
    state = image_state(KEEPS_ALL)
    flags = np.zeros((BATCH, PREFILL), bool)
    flags[:, 0] = True
    inputs = ji.StepInputs(is_image=flags, lengths=np.array([2, 2], np.int32))
    tokens = sequences()[:, :PREFILL]

    def step(run, state):
        return run(params, tokens, state, config=config, inputs=inputs, logits="all", **DENSE)[1]

    begun = step(ji.forward, ji.truncate(state, np.array([2, 3], np.int32)))
    assert np.asarray(begun.status).tolist() == [0, 0]
    back = ji.truncate(state, np.array([5, 3], np.int32))
    with pytest.raises(ValueError, match="continues an image run that an earlier step began"):
        step(ji.forward, back)
    assert np.asarray(step(forward, back).status).tolist() == [int(ji.Status.CUT_RUN), 0]


def test_text_after_a_truncation_leaves_no_trace_of_the_images_that_were_cut_off():
    state = image_state(EVICTS)
    back = ji.truncate(state, np.array([9, 6], np.int32))
    assert not np.asarray(back.image_columns)[0, 9:].any()
    _, later = extend(back, sequences(), [12, 12], "gemma3_image")
    assert np.flatnonzero(np.asarray(later.image_columns)[0]).tolist() == [2, 3, 4, 6, 7]
    assert np.asarray(later.ends_in_image).tolist() == [False, False]


# Three-axis rope


def two_images() -> ji.DecodeState:
    """[1, 2, VS, image of 2 x 2, 5, VS, image of 2 x 2, 7] in row 0, as Qwen3-VL counts it; text in row 1."""
    config, params = model("qwen3_vl")
    image = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    row = [(p, p, p) for p in (0, 1, 2)] + [(3 + t, 3 + h, 3 + w) for t, h, w in image]
    row += [(5, 5, 5), (6, 6, 6)] + [(7 + t, 7 + h, 7 + w) for t, h, w in image] + [(9, 9, 9)]
    positions = np.stack([np.array(row).T, np.tile(np.arange(14), (3, 1))], axis=1).astype(np.int32)
    flags = np.zeros((2, 14), bool)
    flags[0, [3, 4, 5, 6, 9, 10, 11, 12]] = True
    inputs = ji.StepInputs(positions=positions, is_image=flags)
    tokens = sequences()[:, :14]
    return forward(params, tokens, empty(KEEPS_ALL, "qwen3_vl"), config=config, inputs=inputs, **DENSE)[1]


def test_rule_20a_with_three_axis_rope_the_floor_is_the_end_of_the_last_image():
    state = two_images()
    assert np.asarray(state.rope_delta).tolist() == [-4, 0]
    assert floors(state) == [13, 0]
    with pytest.raises(ValueError, match="row 0 holds 14 positions and can go back to 13 at least"):
        ji.truncate(state, np.array([12, 0], np.int32))
    back = ji.truncate(state, np.array([13, 0], np.int32))
    assert np.asarray(back.rope_delta).tolist() == [-4, 0]
    assert floors(back) == [13, 0]
