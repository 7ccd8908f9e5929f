import dataclasses

import numpy as np
import pytest

from jaxinfer.sampling import Sampling, stack_sampling


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, float("inf"), float("nan"), 1e-50, 1e39, 10**400, "hot", None, True]),
        ("top_k", [0, -1, 2.0, 2**31, True]),
        ("top_p", [0, -0.5, 1.01, float("nan"), "most"]),
        ("min_p", [-0.1, 1.01, float("nan")]),
        ("repetition_penalty", [0, -1, float("inf"), float("nan"), 1e-50]),
        ("seed", [-1, 2**64, 0.5, False]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"Sampling\({field}=\.\.\.\) must be .*; got "):
            Sampling(**{field: value})


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_of_0_or_minus_1_is_refused_and_the_error_says_what_is_off(value):
    with pytest.raises(ValueError, match=r"None \(off\)"):
        Sampling(temperature=1.0, top_k=value)


def test_the_bounds_themselves_are_accepted():
    Sampling(temperature=0, top_k=1, top_p=1, min_p=0, repetition_penalty=1e-6, seed=0)
    Sampling(temperature=1e30, top_k=2**31 - 1, top_p=1e-9, min_p=1, repetition_penalty=1e6, seed=2**64 - 1)
    Sampling(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(7))


def test_options_are_frozen_and_hashable():
    options = Sampling(temperature=0.5, seed=1)
    assert {options: 1}[Sampling(temperature=0.5, seed=1)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.temperature = 1.0


def test_rows_hold_the_options_and_neutral_values_where_they_are_off():
    rows = stack_sampling(
        [
            Sampling(seed=(5 << 32) | 7),
            Sampling(
                temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, repetition_penalty=2.0, seed=2**64 - 1
            ),
        ]
    )
    np.testing.assert_array_equal(rows.temperature, np.float32([0, 0.5]))
    np.testing.assert_array_equal(rows.top_k, np.int32([0, 3]))
    np.testing.assert_array_equal(rows.top_p, np.float32([1, 0.25]))
    np.testing.assert_array_equal(rows.min_p, np.float32([0, 0.125]))
    np.testing.assert_array_equal(rows.repetition_penalty, np.float32([1, 2]))
    np.testing.assert_array_equal(rows.rng_key, np.uint32([[5, 7], [2**32 - 1, 2**32 - 1]]))
    assert (rows.top_k.dtype, rows.rng_key.dtype) == (np.int32, np.uint32)


def test_rows_without_a_seed_get_their_own_each_time():
    first, second = (np.asarray(stack_sampling([Sampling(temperature=1.0)] * 2).rng_key) for _ in range(2))
    assert len({tuple(key) for key in (*first, *second)}) == 4


def test_no_rows_are_no_rows():
    assert stack_sampling([]).rng_key.shape == (0, 2)
