"""Span ends of ragged steps against a walk over (sequence, position) pairs; rule 10."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.spans import MaskPolicy, batch_span_ends, key_spans
from tests.spans import oracles, strategies

CAUSAL, VISION = MaskPolicy.CAUSAL, MaskPolicy.VISION_BIDIRECTIONAL
COLUMNS = 14
FEW = settings(max_examples=60, deadline=None)

jitted = jax.jit(batch_span_ends, static_argnums=0)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def flags(*values: int) -> np.ndarray:
    return np.array(values, bool)


@st.composite
def steps(draw):
    """COLUMNS distinct (sequence, position) pairs in any order with flags; sequence -1 is padding."""
    pair = st.tuples(st.integers(-1, 2), st.integers(0, 9))
    chosen = draw(st.lists(pair, min_size=COLUMNS, max_size=COLUMNS, unique=True))
    is_image = draw(strategies.flags(COLUMNS))
    sequences, positions = zip(*chosen, strict=True)
    return int32(*positions), int32(*sequences), is_image


def test_rule_10_worked_example():
    ends = jitted(VISION, int32(5, 0, 4, 1, 6, 0), int32(0, 1, 0, 1, 0, -1), flags(1, 1, 1, 0, 0, 0))
    assert ends.dtype == jnp.int32
    np.testing.assert_array_equal(ends, [5, 0, 5, 1, 6, -1])


@FEW
@given(steps(), strategies.POLICIES)
def test_rule_10_the_end_is_the_last_present_position_of_the_run(step, policy):
    expected = oracles.ragged_ends(*step, bidirectional=policy is VISION)
    np.testing.assert_array_equal(jitted(policy, *step), expected)


@FEW
@given(steps(), st.permutations(range(COLUMNS)))
def test_rule_10_permuting_the_columns_permutes_the_ends(step, order):
    order = np.array(order)
    permuted = jitted(VISION, *(column[order] for column in step))
    np.testing.assert_array_equal(permuted, np.asarray(jitted(VISION, *step))[order])


@FEW
@given(strategies.ANY_FLAGS, strategies.POLICIES)
def test_rule_10_one_sequence_from_zero_gives_the_hi_of_key_spans(is_image, policy):
    count = is_image.shape[0]
    ends = jitted(policy, np.arange(count, dtype=np.int32), np.zeros(count, np.int32), is_image)
    np.testing.assert_array_equal(ends, key_spans(policy, is_image).hi)


def test_rule_10_batch_adjacency_is_irrelevant():
    ends = batch_span_ends(VISION, int32(7, 3, 8, 4, 9), int32(0, 1, 0, 1, 0), flags(1, 1, 1, 1, 1))
    np.testing.assert_array_equal(ends, [9, 4, 9, 4, 9])


def test_rule_10_runs_never_join_two_sequences():
    ends = batch_span_ends(VISION, int32(0, 1, 2, 3), int32(4, 4, 5, 5), flags(1, 1, 1, 1))
    np.testing.assert_array_equal(ends, [1, 1, 3, 3])


def test_rule_10_a_gap_in_positions_ends_a_run():
    ends = batch_span_ends(VISION, int32(1, 2, 4, 5), int32(0, 0, 0, 0), flags(1, 1, 1, 1))
    np.testing.assert_array_equal(ends, [2, 2, 5, 5])


def test_rule_10_a_text_column_ends_a_run():
    ends = batch_span_ends(VISION, int32(1, 2, 3, 4), int32(0, 0, 0, 0), flags(1, 1, 0, 1))
    np.testing.assert_array_equal(ends, [2, 2, 3, 4])


def test_rule_10_padding_columns_end_at_minus_one_and_belong_to_no_run():
    ends = batch_span_ends(VISION, int32(1, 2, 3), int32(0, -1, -1), flags(1, 1, 1))
    np.testing.assert_array_equal(ends, [1, -1, -1])


def test_rule_10_causal_ends_are_the_positions():
    ends = batch_span_ends(CAUSAL, int32(5, 4, 9), int32(0, 0, -1), flags(1, 1, 1))
    np.testing.assert_array_equal(ends, [5, 4, -1])


def test_rule_6_one_decode_column_a_sequence_is_plain_causal():
    ends = batch_span_ends(VISION, int32(7, 8, 3), int32(0, 1, 2), flags(1, 1, 1))
    np.testing.assert_array_equal(ends, [7, 8, 3])


@pytest.mark.parametrize("policy", MaskPolicy)
@pytest.mark.parametrize("count", [0, 1])
def test_rule_9_steps_of_no_column_and_of_one(policy, count):
    ends = batch_span_ends(
        policy, np.full(count, 6, np.int32), np.zeros(count, np.int32), jnp.ones(count, bool)
    )
    np.testing.assert_array_equal(ends, [6] * count)
    assert ends.dtype == jnp.int32


@settings(max_examples=20, deadline=None)
@given(steps(), steps())
def test_rule_13_a_vmap_equals_its_rows(first, second):
    stacked = [np.stack(columns) for columns in zip(first, second, strict=True)]
    ends = vmapped(*stacked)
    np.testing.assert_array_equal(ends[0], jitted(VISION, *first))
    np.testing.assert_array_equal(ends[1], jitted(VISION, *second))


vmapped = jax.jit(jax.vmap(lambda *columns: batch_span_ends(VISION, *columns)))


def test_rule_13_ends_stay_int32_with_64_bit_types_on_and_promotion_strict():
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        ends = batch_span_ends(VISION, int32(2, 1), int32(0, 0), flags(1, 1))
    assert ends.dtype == np.int32
    np.testing.assert_array_equal(ends, [2, 2])


def test_rule_10_nothing_larger_than_a_column_is_built():
    columns = 512
    step = np.arange(columns, dtype=np.int32), np.zeros(columns, np.int32), np.ones(columns, bool)
    compiled = jitted.lower(VISION, *step).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * columns
    np.testing.assert_array_equal(compiled(*step), np.full(columns, columns - 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: batch_span_ends(1, int32(0), int32(0), flags(0)), r"policy=\.\.\.\) must be a MaskPolicy"),
        (
            lambda: batch_span_ends(VISION, int32(0), int32(0), int32(1)),
            r"is_image=\.\.\.\) must be bool \[C\]; got int32 \(1,\)",
        ),
        (
            lambda: batch_span_ends(VISION, np.zeros(1), int32(0), flags(1)),
            r"positions=\.\.\.\) must be int32 \[C\], C = 1 as in is_image; got float64 \(1,\)",
        ),
        (
            lambda: batch_span_ends(VISION, int32(0, 1), int32(0), flags(1, 0)),
            r"sequence_ids=\.\.\.\) must be int32 \[C\], C = 2 as in is_image; got int32 \(1,\)",
        ),
        (
            lambda: batch_span_ends(VISION, int32(0), int32(0), np.zeros((1, 1), bool)),
            r"is_image=\.\.\.\) must be bool \[C\]; got bool \(1, 1\)",
        ),
    ],
)
def test_bad_arguments_are_named_in_the_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
