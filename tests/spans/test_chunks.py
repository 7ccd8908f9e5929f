"""Prefill chunk plans: no cut run, no overlong chunk, and the spans of a single shot; rules 11 and 12."""

from __future__ import annotations

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxinfer.spans import (
    ImageRunTooLongError,
    MaskPolicy,
    chunk_splits_image_run,
    key_spans,
    plan_prefill_chunks,
)
from tests.spans import oracles, strategies

RUN = np.array([0, 1, 1, 0], bool)
MANY = settings(max_examples=150, deadline=None)


@pytest.mark.parametrize("end", range(-2, 7))
def test_rule_11_only_an_end_between_two_image_columns_splits_a_run(end):
    assert chunk_splits_image_run(RUN, end) is (end == 2)


@pytest.mark.parametrize("end", [-1, 0, 1, 2, 3, 4])
def test_rule_11_an_end_outside_an_all_image_row_splits_nothing(end):
    assert chunk_splits_image_run(np.ones(3, bool), end) is (end in (1, 2))


@MANY
@given(strategies.flags(12), st.integers(-3, 15))
def test_rule_11_host_and_jitted_answers_are_the_definition(flags, end):
    expected = oracles.is_cut(flags, end)
    assert chunk_splits_image_run(flags, end) is expected
    assert bool(jitted_splits(flags, end)) is expected


jitted_splits = jax.jit(chunk_splits_image_run)


def test_rule_13_splits_is_vmappable_over_flags_and_ends():
    rows = jnp.stack([RUN, ~RUN, np.ones(4, bool)])
    found = jax.vmap(lambda row: jax.vmap(lambda end: chunk_splits_image_run(row, end))(jnp.arange(-1, 6)))(
        rows
    )
    expected = [[oracles.is_cut(row, end) for end in range(-1, 6)] for row in np.asarray(rows)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", [0, 1])
def test_rule_13_a_traced_end_on_a_row_too_short_to_cut_is_false(count):
    assert not jax.jit(chunk_splits_image_run)(np.ones(count, bool), 1)


def test_rule_11_device_arrays_that_are_known_give_a_python_bool():
    assert chunk_splits_image_run(jnp.asarray(RUN), jnp.int32(2)) is True


@MANY
@given(st.integers(0, 40).flatmap(strategies.flags), st.integers(1, 9))
def test_rule_12_chunks_reach_as_far_as_they_may_without_cutting_a_run(flags, max_chunk):
    assume(oracles.longest_run(flags) <= max_chunk)
    chunks = plan_prefill_chunks(flags, max_chunk)
    assert chunks == oracles.greedy_chunks(flags, max_chunk)
    assert [column for start, end in chunks for column in range(start, end)] == list(range(flags.shape[0]))
    assert all(1 <= end - start <= max_chunk for start, end in chunks)
    assert not any(chunk_splits_image_run(flags, end) for _, end in chunks)


@MANY
@given(strategies.flags(12), st.integers(1, 9))
def test_rule_12_a_plan_is_refused_iff_a_run_is_longer_than_a_chunk(flags, max_chunk):
    longest = oracles.longest_run(flags)
    if longest <= max_chunk:
        assert plan_prefill_chunks(flags, max_chunk)
    else:
        with pytest.raises(ImageRunTooLongError):
            plan_prefill_chunks(flags, max_chunk)


def test_rule_12_a_chunk_that_would_cut_a_run_ends_before_it():
    assert plan_prefill_chunks(np.array([0, 0, 1, 1, 1, 0], bool), 4) == ((0, 2), (2, 6))


def test_rule_12_a_run_exactly_as_long_as_a_chunk_is_one_chunk():
    assert plan_prefill_chunks(np.array([0, 1, 1, 1, 0], bool), 3) == ((0, 1), (1, 4), (4, 5))


def test_rule_12_a_run_longer_than_a_chunk_is_refused_with_both_lengths():
    with pytest.raises(ImageRunTooLongError, match=r"a run of 7 columns at column 2 .* at most 5;") as caught:
        plan_prefill_chunks(np.array([0, 0] + [1] * 7 + [0], bool), 5)
    error = caught.value
    assert isinstance(error, ValueError)
    assert (error.run_len, error.max_chunk, error.start) == (7, 5, 2)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)


def test_rule_12_images_side_by_side_are_one_run():
    two_images_of_three = np.array([0, 1, 1, 1, 1, 1, 1, 0], bool)
    with pytest.raises(ImageRunTooLongError, match="a run of 6 columns"):
        plan_prefill_chunks(two_images_of_three, 4)
    assert plan_prefill_chunks(two_images_of_three, 6) == ((0, 1), (1, 7), (7, 8))


def test_rule_12_a_causal_model_plans_without_flags_and_may_cut_anywhere():
    assert plan_prefill_chunks(np.zeros(7, bool), 3) == ((0, 3), (3, 6), (6, 7))


def test_rule_12_an_empty_prompt_has_no_chunk():
    assert plan_prefill_chunks([], 4) == ()
    assert plan_prefill_chunks(jnp.zeros(0, bool), 4) == ()


def test_rule_12_chunks_are_python_ints_whatever_the_flags_are():
    for flags in (RUN, RUN.tolist(), jnp.asarray(RUN)):
        chunks = plan_prefill_chunks(flags, np.int64(2))
        assert chunks == ((0, 1), (1, 3), (3, 4))
        assert all(type(bound) is int for chunk in chunks for bound in chunk)


@settings(max_examples=40, deadline=None)
@given(strategies.flags(12), strategies.POLICIES, st.sampled_from((None, 4)), st.permutations((1, 3, 3, 5)))
def test_rules_9_and_12_every_legal_chunking_gives_the_spans_of_a_single_shot(flags, policy, window, lens):
    bounds = np.cumsum([0, *lens])
    if policy is MaskPolicy.VISION_BIDIRECTIONAL:
        for cut in bounds[1:-1]:  # text goes where the chunks meet inside a run: now every cut is legal
            flags[cut] &= not oracles.is_cut(flags, cut)
    parts = [
        jitted_spans(policy, flags[start:end], window, offset=np.int32(start))
        for start, end in itertools.pairwise(bounds)
    ]
    whole = jitted_spans(policy, flags, window, offset=np.int32(0))
    np.testing.assert_array_equal(np.concatenate([part.lo for part in parts]), whole.lo)
    np.testing.assert_array_equal(np.concatenate([part.hi for part in parts]), whole.hi)


jitted_spans = jax.jit(key_spans, static_argnums=(0, 2))


def test_a_cut_inside_a_run_would_change_the_spans():
    run = np.ones(4, bool)
    vision = MaskPolicy.VISION_BIDIRECTIONAL
    cut = np.concatenate([key_spans(vision, run[:2]).hi, key_spans(vision, run[2:], offset=2).hi])
    assert cut.tolist() != key_spans(vision, run).hi.tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_prefill_chunks(RUN, 0), r"max_chunk=\.\.\.\) must be an int of at least 1; got 0"),
        (lambda: plan_prefill_chunks(RUN, -4), r"max_chunk=\.\.\.\) must be an int of at least 1; got -4"),
        (lambda: plan_prefill_chunks(RUN, 2.0), r"max_chunk=\.\.\.\) must be an int of at least 1; got 2\.0"),
        (
            lambda: plan_prefill_chunks(RUN, True),
            r"max_chunk=\.\.\.\) must be an int of at least 1; got True",
        ),
        (
            lambda: plan_prefill_chunks(RUN.astype(np.int32), 4),
            r"plan_prefill_chunks\(is_image=\.\.\.\) must be bool \[n\]; got int32 \(4,\)",
        ),
        (
            lambda: plan_prefill_chunks(RUN[None], 4),
            r"plan_prefill_chunks\(is_image=\.\.\.\) must be bool \[n\]; got bool \(1, 4\)",
        ),
        (
            lambda: jax.jit(lambda flags: jnp.array(plan_prefill_chunks(flags, 4)))(RUN),
            r"must be known on the host; got a traced array",
        ),
        (
            lambda: chunk_splits_image_run(RUN[None], 1),
            r"chunk_splits_image_run\(is_image=\.\.\.\) must be bool \[n\]; got bool \(1, 4\)",
        ),
        (
            lambda: chunk_splits_image_run(RUN, 1.0),
            r"chunk_end=\.\.\.\) must be one int or int32; got float64 \(\)",
        ),
        (lambda: chunk_splits_image_run(RUN, True), r"chunk_end=\.\.\.\) must be one int or int32; got bool"),
        (
            lambda: chunk_splits_image_run(RUN, np.array([1, 2], np.int32)),
            r"chunk_end=\.\.\.\) must be one int or int32; got int32 \(2,\)",
        ),
    ],
)
def test_bad_arguments_are_named_in_the_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
