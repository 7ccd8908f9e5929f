"""Key spans of dense steps against a dense mask, rule by rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxinfer.spans import KeySpans, MaskPolicy, key_spans
from tests.spans import oracles, strategies

CAUSAL, VISION = MaskPolicy.CAUSAL, MaskPolicy.VISION_BIDIRECTIONAL
TWO_IMAGES = np.array([0, 0, 1, 1, 1, 0, 1, 1, 0], bool)
FEW = settings(max_examples=60, deadline=None)

jitted = jax.jit(key_spans, static_argnums=(0, 2))


def pairs(spans: KeySpans) -> list[tuple[int, int]]:
    return list(zip(np.asarray(spans.lo).tolist(), np.asarray(spans.hi).tolist(), strict=True))


def primitives(policy: MaskPolicy, q_len: int, window: int | None = 3) -> str:
    return str(jax.make_jaxpr(lambda flags: key_spans(policy, flags, window))(np.zeros(q_len, bool)))


def test_rule_1_both_ends_of_a_span_are_read():
    mask = KeySpans(lo=jnp.array([1], jnp.int32), hi=jnp.array([3], jnp.int32)).as_mask(5)
    np.testing.assert_array_equal(mask, [[False, True, True, True, False]])


def test_rule_1_a_span_whose_hi_is_below_its_lo_reads_nothing():
    mask = KeySpans(lo=jnp.array([0, 3, 2], jnp.int32), hi=jnp.array([-1, 2, 2], jnp.int32)).as_mask(4)
    np.testing.assert_array_equal(np.asarray(mask).sum(axis=-1), [0, 0, 1])


@pytest.mark.parametrize("window", strategies.WINDOWS)
def test_rule_2_image_flags_change_nothing_under_causal(window):
    with_images = key_spans(CAUSAL, TWO_IMAGES, window, offset=4)
    without = key_spans(CAUSAL, np.zeros_like(TWO_IMAGES), window, offset=4)
    assert pairs(with_images) == pairs(without)
    np.testing.assert_array_equal(with_images.hi, np.arange(4, 13))


@pytest.mark.parametrize("policy", MaskPolicy)
def test_rule_3_lo_is_zero_without_a_window_and_clipped_at_zero_with_one(policy):
    np.testing.assert_array_equal(key_spans(policy, TWO_IMAGES, offset=2).lo, np.zeros(9))
    np.testing.assert_array_equal(key_spans(policy, TWO_IMAGES, 4, offset=2).lo, [0, 0, 1, 2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("policy", MaskPolicy)
def test_rule_3_a_window_of_zero_means_no_window(policy):
    assert pairs(key_spans(policy, TWO_IMAGES, 0)) == pairs(key_spans(policy, TWO_IMAGES, None))


def test_rule_3_a_causal_query_reads_exactly_min_of_its_position_plus_one_and_the_window():
    seen = key_spans(CAUSAL, np.zeros(9, bool), 4).as_mask(9)
    np.testing.assert_array_equal(np.asarray(seen).sum(axis=-1), np.minimum(np.arange(9) + 1, 4))


def test_rule_4_a_run_that_ends_more_than_a_window_in_leaves_every_floor_where_the_query_puts_it():
    run = np.array([0] + [1] * 9, bool)
    spans = key_spans(VISION, run, 3)
    np.testing.assert_array_equal(spans.lo, [0, 0, 0, 1, 2, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(spans.hi, [0] + [9] * 9)


@FEW
@given(strategies.ANY_FLAGS, st.sampled_from(strategies.WINDOWS), strategies.OFFSETS)
def test_rule_4_lo_is_the_same_under_every_policy(flags, window, offset):
    start = np.int32(offset)
    np.testing.assert_array_equal(
        jitted(VISION, flags, window, offset=start).lo, jitted(CAUSAL, flags, window, offset=start).lo
    )


def test_rule_5_two_images_do_not_see_each_other_but_the_later_reads_the_earlier_above_its_floor():
    assert pairs(key_spans(VISION, TWO_IMAGES)) == [
        *[(0, 0), (0, 1), (0, 4), (0, 4), (0, 4), (0, 5), (0, 7), (0, 7), (0, 8)]
    ]
    assert pairs(key_spans(VISION, TWO_IMAGES, 3)) == [
        *[(0, 0), (0, 1), (0, 4), (1, 4), (2, 4), (3, 5), (4, 7), (5, 7), (6, 8)]
    ]


@FEW
@given(strategies.ANY_FLAGS, strategies.POLICIES, st.sampled_from(strategies.WINDOWS), strategies.OFFSETS)
def test_rules_1_to_5_and_9_the_spans_are_the_dense_mask(flags, policy, window, offset):
    kv_len = offset + flags.shape[0] + 2
    spans = jitted(policy, flags, window, offset=np.int32(offset))
    expected = oracles.dense_mask(
        flags, bidirectional=policy is VISION, window=window, offset=offset, kv_len=kv_len
    )
    keys = np.arange(kv_len)
    mask = (keys >= np.asarray(spans.lo)[:, None]) & (keys <= np.asarray(spans.hi)[:, None])
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("policy", MaskPolicy)
def test_as_mask_is_the_dense_mask(policy):
    expected = oracles.dense_mask(TWO_IMAGES, bidirectional=policy is VISION, window=3, offset=2, kv_len=12)
    mask = jax.jit(KeySpans.as_mask, static_argnums=1)(key_spans(policy, TWO_IMAGES, 3, offset=2), 12)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask, expected)


def test_as_mask_keeps_leading_axes_and_allows_no_keys():
    spans = key_spans(CAUSAL, np.zeros((2, 3, 4), bool))
    assert spans.as_mask(6).shape == (2, 3, 4, 6)
    assert spans.as_mask(0).shape == (2, 3, 4, 0)


@pytest.mark.parametrize("window", strategies.WINDOWS)
def test_rule_6_a_decode_step_is_plain_causal_even_on_an_image_column(window):
    image = jnp.ones((2, 1), bool)
    offset = jnp.array([3, 9], jnp.int32)
    decode = key_spans(VISION, image, window, offset=offset)
    np.testing.assert_array_equal(decode.hi, [[3], [9]])
    np.testing.assert_array_equal(decode.lo, key_spans(CAUSAL, image, window, offset=offset).lo)


def test_rule_6_a_multi_token_step_that_continues_from_a_cache_is_prefill():
    np.testing.assert_array_equal(key_spans(VISION, np.ones(3, bool), offset=5).hi, [7, 7, 7])


def test_rule_7_policy_and_window_are_chosen_a_layer_in_one_trace():
    layers = ((CAUSAL, None), (VISION, 2), (VISION, None), (CAUSAL, 2))
    spans = jax.jit(lambda flags: [key_spans(policy, flags, window) for policy, window in layers])(
        np.array([0, 1, 1, 0], bool)
    )
    assert [pairs(layer) for layer in spans] == [
        [(0, 0), (0, 1), (0, 2), (0, 3)],
        [(0, 0), (0, 2), (1, 2), (2, 3)],
        [(0, 0), (0, 2), (0, 2), (0, 3)],
        [(0, 0), (0, 1), (1, 2), (2, 3)],
    ]


@pytest.mark.parametrize("ids", [np.array([5, 9, 9, 5], np.int32), np.array([0.0, 1.0]), [0, 1]])
def test_rule_8_runs_come_from_flags_and_token_ids_are_refused(ids):
    with pytest.raises(ValueError, match=r"key_spans\(is_image=\.\.\.\) must be bool \[\.\.\., T\]; got"):
        key_spans(VISION, ids)


@pytest.mark.parametrize("policy", MaskPolicy)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_rule_9_empty_input_gives_empty_spans(policy, shape):
    spans = key_spans(policy, jnp.zeros(shape, bool), 3, offset=7)
    assert spans.lo.shape == spans.hi.shape == shape
    assert spans.lo.dtype == spans.hi.dtype == jnp.int32


def test_rule_9_a_run_of_one_column_ends_at_itself():
    np.testing.assert_array_equal(key_spans(VISION, np.array([1, 0, 1, 0, 1], bool)).hi, np.arange(5))


@FEW
@given(strategies.ANY_FLAGS, strategies.POLICIES, strategies.OFFSETS)
def test_rule_9_spans_are_one_a_column_and_offset_shifts_them(flags, policy, offset):
    shifted = jitted(policy, flags, None, offset=np.int32(offset))
    assert shifted.hi.shape == flags.shape
    np.testing.assert_array_equal(shifted.hi, jitted(policy, flags, None, offset=np.int32(0)).hi + offset)


@FEW
@given(
    st.lists(strategies.flags(12), min_size=3, max_size=3),
    st.lists(strategies.OFFSETS, min_size=3, max_size=3),
    strategies.POLICIES,
    st.sampled_from(strategies.WINDOWS),
)
def test_rule_13_a_batch_with_one_offset_a_row_equals_its_rows_and_its_vmap(rows, offsets, policy, window):
    flags, starts = np.stack(rows), np.array(offsets, np.int32)
    batch = jitted(policy, flags, window, offset=starts)
    mapped = vmapped(policy, flags, window, starts)
    for row in range(3):
        alone = jitted(policy, flags[row], window, offset=starts[row])
        for found in (batch, mapped):
            np.testing.assert_array_equal(found.lo[row], alone.lo)
            np.testing.assert_array_equal(found.hi[row], alone.hi)


@jax.jit(static_argnums=(0, 2))
def vmapped(policy, flags, window, starts):
    return jax.vmap(lambda row, start: key_spans(policy, row, window, offset=start))(flags, starts)


def test_rule_13_one_offset_a_row_also_serves_flags_that_the_rows_share():
    spans = key_spans(VISION, np.array([0, 1, 1], bool), 2, offset=jnp.array([0, 5], jnp.int32))
    np.testing.assert_array_equal(spans.hi, [[0, 2, 2], [5, 7, 7]])
    np.testing.assert_array_equal(spans.lo, [[0, 0, 1], [4, 5, 6]])


def test_rule_13_a_new_offset_or_new_flags_compile_nothing():
    step = jax.jit(lambda flags, offset: key_spans(VISION, flags, 3, offset=offset))
    for offset in range(4):
        step(np.roll(TWO_IMAGES, offset), offset)
    assert step._cache_size() == 1


def test_rule_13_spans_are_a_pytree_that_scan_can_carry():
    def step(spans, offset):
        return key_spans(VISION, jnp.asarray(TWO_IMAGES), 3, offset=offset), spans.hi[0]

    last, firsts = lax.scan(step, key_spans(VISION, TWO_IMAGES, 3), jnp.array([4, 8], jnp.int32))
    np.testing.assert_array_equal(firsts, [0, 4])
    np.testing.assert_array_equal(last.hi, np.array([0, 1, 4, 4, 4, 5, 7, 7, 8]) + 8)


def test_rule_13_spans_stay_int32_with_64_bit_types_on_and_promotion_strict():
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        spans = key_spans(VISION, np.stack([TWO_IMAGES] * 2), 3, offset=np.array([0, 2], np.int32))
        mask = spans.as_mask(12)
    assert spans.lo.dtype == spans.hi.dtype == np.int32
    assert mask.shape == (2, 9, 12)


def test_right_padding_flagged_false_leaves_the_spans_of_real_columns_alone():
    padded = np.zeros((2, 9), bool)
    padded[0], padded[1, :4] = TWO_IMAGES, TWO_IMAGES[:4]
    spans = key_spans(VISION, padded, 3, offset=np.array([0, 6], np.int32))
    short = key_spans(VISION, TWO_IMAGES[:4], 3, offset=6)
    np.testing.assert_array_equal(spans.hi[1, :4], short.hi)
    np.testing.assert_array_equal(spans.lo[1, :4], short.lo)


def test_runs_are_looked_for_only_where_one_can_matter():
    assert "cummin" in primitives(VISION, 2)
    assert "cummin" not in primitives(VISION, 1)
    assert "cummin" not in primitives(CAUSAL, 9)
    text = jax.make_jaxpr(lambda offset: key_spans(VISION, np.zeros((2, 9), bool), 3, offset=offset))
    assert "cummin" not in str(text(np.zeros(2, np.int32)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: key_spans("causal", TWO_IMAGES), r"policy=\.\.\.\) must be a MaskPolicy"),
        (lambda: key_spans(CAUSAL, np.array(True)), r"must be bool \[\.\.\., T\]; got bool \(\)"),
        (lambda: key_spans(CAUSAL, TWO_IMAGES, -1), r"window=\.\.\.\) must be a Python int .* got -1"),
        (lambda: key_spans(CAUSAL, TWO_IMAGES, 2.0), r"window=\.\.\.\) must be a Python int .* got 2\.0"),
        (lambda: key_spans(CAUSAL, TWO_IMAGES, True), r"window=\.\.\.\) must be a Python int .* got True"),
        (lambda: key_spans(CAUSAL, TWO_IMAGES, jnp.int32(3)), r"window=\.\.\.\) must be a Python int"),
        (lambda: key_spans(CAUSAL, TWO_IMAGES, offset=-1), r"offset=\.\.\.\) must be a Python int .* got -1"),
        (lambda: key_spans(CAUSAL, TWO_IMAGES, offset=1.5), r"offset=\.\.\.\) must be a Python int"),
        (lambda: key_spans(CAUSAL, TWO_IMAGES, offset=2**31 - 3), r"keep positions of 9 columns from 0"),
        (
            lambda: key_spans(CAUSAL, TWO_IMAGES, offset=np.array([0, -2], np.int32)),
            r"keep positions of 9 columns from 0 to 2\*\*31 - 1; got \[ 0 -2\]",
        ),
        (
            lambda: key_spans(CAUSAL, TWO_IMAGES, offset=jnp.zeros(2, jnp.float32)),
            r"offset=\.\.\.\) must be an int or int32; got float32 \(2,\)",
        ),
        (
            lambda: key_spans(CAUSAL, np.zeros((3, 4), bool), offset=jnp.zeros(2, jnp.int32)),
            r"must broadcast against the leading axes \(3,\) of is_image; got \(2,\)",
        ),
        (lambda: key_spans(CAUSAL, TWO_IMAGES).as_mask(-1), r"kv_len=\.\.\.\) must be a Python int"),
        (
            lambda: KeySpans(lo=jnp.zeros(2, jnp.int32), hi=jnp.zeros(3, jnp.int32)).as_mask(4),
            r"must have one shape \[\.\.\., T\]; got \(2,\) and \(3,\)",
        ),
    ],
)
def test_bad_arguments_are_named_in_the_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
