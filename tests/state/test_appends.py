"""A state fed in pieces of any size gives what one cold pass gives, whatever its layers keep."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxinfer as ji
from jaxinfer.testing import random_params
from tests.state.harness import (
    BATCH,
    CAPACITY,
    DENSE,
    EVICTS,
    KEEPS_ALL,
    LAYOUTS,
    LENGTH,
    PREFILL,
    ROUNDING,
    WIDTH,
    WINDOW,
    append,
    append_all,
    assert_follows,
    cold_logits,
    empty,
    extend,
    forward,
    live_rows,
    model,
    sequences,
)

COUNTS = st.lists(st.integers(0, WIDTH), min_size=BATCH, max_size=BATCH)


@given(appends=st.lists(COUNTS, max_size=8), seed=st.integers(0, 3))
@settings(deadline=None, max_examples=8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rule_37_appends_of_any_size_give_a_cold_pass_and_evict(layout, appends, seed):
    tokens = sequences(seed)
    state = empty(layout)
    for counts in appends:
        counts = np.minimum(counts, LENGTH - np.asarray(state.length))
        before = np.asarray(state.length)
        logits, state = append(state, tokens, counts)
        assert np.asarray(state.length).tolist() == (before + counts).tolist()
        assert_follows(logits, tokens, np.where(counts > 0, state.length, 0))
        for layer in state.layers[:2] if layout is not KEEPS_ALL else ():
            assert (np.asarray(state.length) - np.asarray(layer.base) <= layer.window.max_rows).all()
    assert np.asarray(state.status).tolist() == [0, 0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("width", [PREFILL, 1], ids=["prefill", "decode"])
def test_fault_4_a_gemma_layer_reads_the_token_at_its_windows_edge_and_not_the_one_before(layout, width):
    """One local layer alone, so that nothing passes on what lies outside the window."""
    config, _ = model()
    config = dataclasses.replace(config, layers=config.layers[:1])
    params = random_params(config, seed=3)
    query = 10

    def logits_at_query(tokens):
        state = ji.init_state(
            config,
            batch=BATCH,
            capacity=CAPACITY,
            max_append=layout.max_append,
            kv_window=layout.policy,
        )
        for start in range(0, query + 1, width):
            step = np.zeros((BATCH, width), np.int32)
            count = min(width, query + 1 - start)
            step[:, :count] = tokens[:, start : start + count]
            inputs = ji.StepInputs(lengths=np.full(BATCH, count, np.int32))
            logits, state = forward(params, step, state, config=config, inputs=inputs, logits="all", **DENSE)
        return np.asarray(logits)[:, count - 1]

    tokens = sequences()[:, : query + 1]
    changed = tokens.copy()
    changed[0, query - WINDOW] += 1
    changed[1, query - WINDOW + 1] += 1
    before, after = logits_at_query(tokens), logits_at_query(changed)
    np.testing.assert_array_equal(before[0], after[0])
    assert np.abs(before[1] - after[1]).max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fault_5_ten_tokens_at_once_one_by_one_and_in_chunks_are_the_same(layout):
    tokens = sequences()
    cold = cold_logits(tokens)
    for chunks, width in (((10,), PREFILL), ((1,) * 10, 1), ((3, 4, 3), WIDTH)):
        state, start = empty(layout), 0
        for count in chunks:
            logits, state = append_all(state, tokens, [count] * BATCH, width=width)
            wanted = cold[:, start : start + count]
            np.testing.assert_allclose(logits[:, :count], wanted, atol=ROUNDING, rtol=ROUNDING)
            start += count


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fault_6_a_token_changes_nothing_before_it_in_a_prefill_longer_than_the_window(layout):
    tokens = sequences()
    changed = tokens.copy()
    changed[:, 9] += 1
    plain, _ = append_all(empty(layout), tokens, [11, 11], width=PREFILL)
    other, _ = append_all(empty(layout), changed, [11, 11], width=PREFILL)
    np.testing.assert_array_equal(plain[:, :9], other[:, :9])
    assert (np.abs(plain - other)[:, 9:11].max(-1) > 1e-3).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fault_8_the_next_position_is_the_consumed_length_not_the_resident_rows(layout):
    tokens = sequences()
    _, state = extend(empty(layout), tokens, [10, 10])
    assert np.asarray(state.length).tolist() == [10, 10]
    if layout is not KEEPS_ALL:
        assert (10 - np.asarray(state.layers[0].base)).tolist() == [ji.KvWindow(WINDOW, 2).rows_after(10)] * 2
    logits, _ = append(state, tokens, [1, 1])
    assert_follows(logits, tokens, [11, 11])


@pytest.mark.parametrize("garbage", [1e30, np.inf, np.nan])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fault_9_rows_that_hold_no_position_are_never_read(layout, garbage):
    tokens = sequences()
    _, state = extend(empty(layout), tokens, [13, 9])
    clean, _ = append(state, tokens, [2, 6])

    def spoilt(layer):
        rows = state.length - getattr(layer, "base", jnp.zeros(BATCH, jnp.int32))
        dead = jnp.arange(layer.key.shape[2]) >= rows[:, None]
        dead = dead[:, None, :, None]
        return layer.replace(
            key=jnp.where(dead, garbage, layer.key), value=jnp.where(dead, garbage, layer.value)
        )

    spoilt_state = state.replace(layers=tuple(spoilt(layer) for layer in state.layers))
    dirty, after = append(spoilt_state, tokens, [2, 6])
    np.testing.assert_array_equal(dirty, clean)
    later, _ = append(after, tokens, [6, 6])
    assert_follows(later, tokens, [21, 21])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fault_20_prefill_and_decode_give_a_cold_pass_at_every_split(layout):
    tokens = sequences()
    for splits in zip(range(1, 12), range(11, 0, -1), strict=True):
        logits, state = append(empty(layout), tokens, splits, width=PREFILL)
        assert_follows(logits, tokens, splits)
        while (np.asarray(state.length) < 12).any():
            counts = np.asarray(state.length) < 12
            logits, state = append(state, tokens, counts.astype(int), width=1)
            assert_follows(logits, tokens, np.where(counts, state.length, 0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_right_padding_changes_no_leaf_of_the_state(layout):
    config, params = model()
    tokens = sequences()
    _, state = extend(empty(layout), tokens, [9, 5])
    lengths = np.array([2, 5], np.int32)
    after = []
    for fill in (0, 1, 2):
        padded = np.full((BATCH, WIDTH), fill, np.int32)
        for row in range(BATCH):
            start = int(state.length[row])
            padded[row, : lengths[row]] = tokens[row, start : start + lengths[row]]
        inputs = ji.StepInputs(lengths=lengths)
        after.append(forward(params, padded, state, config=config, inputs=inputs, logits="all", **DENSE)[1])
    for padded in after[1:]:
        for got, wanted in zip(jax.tree.leaves(padded), jax.tree.leaves(after[0]), strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_padded_rows_hold_what_unpadded_rows_hold(layout):
    tokens = sequences()
    _, padded = extend(empty(layout), tokens, [14, 11])
    single = empty(layout)
    for position in range(14):
        _, single = append(single, tokens, [1, position < 11], width=1)
    assert np.asarray(single.length).tolist() == [14, 11]
    for got, wanted in zip(live_rows(padded), live_rows(single), strict=True):
        for row in range(BATCH):
            shared = min(got[row].shape[1], wanted[row].shape[1])
            assert shared >= min(int(single.length[row]), WINDOW)
            np.testing.assert_allclose(
                got[row][:, -shared:], wanted[row][:, -shared:], atol=ROUNDING, rtol=ROUNDING
            )


@pytest.mark.parametrize("layout", [KEEPS_ALL, EVICTS], ids=str)
def test_overflow_inside_jit_moves_no_row_and_drops_what_does_not_fit(layout):
    tokens = sequences()
    tokens = np.concatenate([tokens, tokens], axis=1)
    _, state = extend(empty(layout), tokens, [CAPACITY - 2, 20])
    logits, over = append(state, tokens, [6, 6])
    _, exact = append(state, tokens, [2, 6])
    assert np.asarray(over.length).tolist() == [CAPACITY, 26]
    assert np.asarray(over.status).tolist() == [int(ji.Status.OVERFLOWED), 0]
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    for got, wanted in zip(live_rows(over), live_rows(exact), strict=True):
        for row in range(BATCH):
            np.testing.assert_array_equal(got[row], wanted[row])


def test_sliding_layers_alone_are_not_bounded_by_the_capacity():
    family = "mistral"
    tokens = sequences()
    state = empty(EVICTS, family, capacity=20)  # buffers hold 4 + 2 + 6 rows
    assert state.capacity is None
    logits, state = extend(state, tokens, [LENGTH, 33], family)
    assert_follows(logits, tokens, [LENGTH, 33], family)
    assert empty(EVICTS, family, capacity=12).capacity == 12
    assert empty(KEEPS_ALL, family, capacity=20).capacity == 20
