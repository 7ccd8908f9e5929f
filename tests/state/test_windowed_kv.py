"""A layer's rows under appends of any size: which are kept, and which a query sees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.ops import span_attention
from jaxinfer.spans import MaskPolicy, key_spans
from jaxinfer.state import FullKV, KvWindow, Step, WindowedKV

BATCH, WIDTH, CAPACITY, SIZE = 2, 7, 64, 64
WINDOWS = (KvWindow(1, 0), KvWindow(4, 2), KvWindow(5, 7))
APPENDS = st.lists(st.lists(st.integers(0, WIDTH), min_size=BATCH, max_size=BATCH), max_size=9)


def empty_layer(window: KvWindow | None, max_append: int) -> FullKV | WindowedKV:
    rows = CAPACITY if window is None else window.max_rows + max_append
    key, value = (jnp.full((BATCH, 1, rows, SIZE), 1e9, jnp.float32) for _ in range(2))
    if window is None:
        return FullKV(key, value)
    return WindowedKV(key, value, jnp.zeros(BATCH, jnp.int32), window, rows)


@functools.partial(jax.jit, static_argnames=("width", "window"))
def append(layer, start, lengths, *, width: int, window: int | None):
    """Appends rows whose value is their position as a one-hot vector; every query weighs its keys alike.

    Returns the layer and what the queries saw, [B, T, SIZE]: 1 / n at each of the n positions read.
    """
    position = start[:, None] + jnp.arange(width)
    valid = jnp.arange(width) < lengths[:, None]
    spans = key_spans(MaskPolicy.CAUSAL, np.zeros((BATCH, width), bool), window, offset=start)
    spans = spans.replace(lo=jnp.where(valid, spans.lo, 0), hi=jnp.where(valid, spans.hi, -1))
    step = Step(start, lengths, (spans,), (), CAPACITY)
    value = jax.nn.one_hot(position, SIZE)[:, None]
    layer, rows = layer.write(step, spans, jnp.zeros_like(value), value)
    query = jnp.zeros((BATCH, width, 1, SIZE))
    seen = span_attention(query, *rows, softmax_scale=1.0, implementation="reference")
    return layer.evict(step, seen), seen


def seen_positions(seen: np.ndarray) -> list[int]:
    return np.flatnonzero(seen > 1e-6).tolist()


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("max_append", [WIDTH, 2])
@given(appends=APPENDS)
@settings(deadline=None, max_examples=10)
def test_rule_34_rows_stay_contiguous_and_bounded_after_appends_of_any_size(window, max_append, appends):
    layer = empty_layer(window, max_append)
    length, rows = np.zeros(BATCH, np.int32), np.zeros(BATCH, np.int32)
    for lengths in appends:
        if (length + lengths > CAPACITY).any():
            break
        layer, _ = append(layer, length, np.asarray(lengths, np.int32), width=WIDTH, window=window.window)
        length = length + np.asarray(lengths, np.int32)
        rows = np.minimum([window.rows_after(int(p)) for p in length], rows + lengths)
        np.testing.assert_array_equal(length - np.asarray(layer.base), rows)
        assert (rows <= window.max_rows).all()
        assert layer.key.shape[2] == window.max_rows + max_append
        for row in range(BATCH):
            held = np.asarray(layer.value)[row, 0, : rows[row]]
            expected = np.arange(length[row] - rows[row], length[row])
            np.testing.assert_array_equal(held, np.eye(SIZE, dtype=np.float32)[expected])


@pytest.mark.parametrize("window", [None, *WINDOWS[:2]], ids=str)
@pytest.mark.parametrize("chunks", [(10,), (1,) * 10, (3, 4, 3), (2, 7, 1)], ids=str)
def test_fault_4_visible_keys_are_the_window_in_prefill_decode_and_store_alike(window, chunks):
    reach = 4 if window is None else window.window
    layer = empty_layer(window, 10)
    start = np.zeros(BATCH, np.int32)
    for count in chunks:
        lengths = np.full(BATCH, count, np.int32)
        width = count if count in (1, 10) else WIDTH
        layer, seen = append(layer, start, lengths, width=width, window=reach)
        for column in range(count):
            query = int(start[0]) + column
            for row in range(BATCH):
                expected = list(range(max(0, query - reach + 1), query + 1))
                assert seen_positions(np.asarray(seen)[row, column]) == expected
        start = start + lengths


def test_eviction_moves_each_batch_row_by_its_own_count():
    window = KvWindow(4, 2)
    layer = empty_layer(window, WIDTH)
    length = np.zeros(BATCH, np.int32)
    for lengths in ([7, 2], [0, 3], [1, 7]):
        layer, _ = append(layer, length, np.asarray(lengths, np.int32), width=WIDTH, window=4)
        length = length + np.asarray(lengths, np.int32)
    assert length.tolist() == [8, 12]
    assert np.asarray(layer.base).tolist() == [3, 6]  # rows_after: 5 and 6


def test_a_buffer_cut_to_the_capacity_never_evicts_below_the_first_eviction():
    window = KvWindow(8, 4)
    key = jnp.zeros((BATCH, 1, 10, SIZE))
    layer = WindowedKV(key, key + 1, jnp.zeros(BATCH, jnp.int32), window, 10)
    full = np.full(BATCH, 10, np.int32)
    step = Step(full - 2, np.full(BATCH, 2, np.int32), (), (), 10)
    assert layer.evict(step, key) is layer
