"""The common token prefix: rule 14 and fault 11."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.prefix import longest_common_token_prefix

SMALL = st.lists(st.integers(0, 1), max_size=8)


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([], [1, 2], 0),
        ([1, 2], [], 0),
        ([], [], 0),
        ([9, 2, 3], [1, 2, 3], 0),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
    ],
    ids=str,
)
def test_rule_14_the_common_prefix_ends_at_the_first_difference_or_the_shorter_end(a, b, shared):
    assert longest_common_token_prefix(a, b) == shared


@given(SMALL, SMALL)
def test_the_common_prefix_is_the_longest_one_that_is_common(a, b):
    shared = longest_common_token_prefix(a, b)
    assert a[:shared] == b[:shared]
    assert a[: shared + 1] != b[: shared + 1] or shared == min(len(a), len(b))


@pytest.mark.parametrize("difference", [0, 1, 1023, 1024, 1025, 2047, 2048, 4998, 4999])
def test_a_difference_is_found_wherever_it_lies_in_a_long_history(difference):
    a = list(range(5000))
    b = [*a[:difference], -1, *a[difference + 1 :]]
    assert longest_common_token_prefix(a, b) == difference


def test_lists_tuples_ranges_and_integer_arrays_compare_alike():
    kinds = [[5, 6, 7], (5, 6, 7), range(5, 8), np.array([5, 6, 7], np.int32), np.array([5, 6, 7], np.int64)]
    assert {longest_common_token_prefix(a, b) for a in kinds for b in kinds} == {3}


def test_fault_11_histories_with_equal_hashes_share_only_their_true_prefix():
    a, b = 40, 70  # 31 * a + b == 31 * (a + 1) + (b - 31): a rolling hash takes these for the same
    prefix, tail = [3, 4], [8, 9]
    old = [*prefix, a, b, *tail]
    assert longest_common_token_prefix(old, [*prefix, a + 1, b - 31, *tail]) == 2
    assert longest_common_token_prefix(old, [*prefix, a + 31, b - 1, *tail]) == 2
    assert hash(-1) == hash(-2)
    assert longest_common_token_prefix([1, -1, 5], [1, -2, 5]) == 1


@pytest.mark.parametrize("bad", [[1.0], ["1"], [None], np.zeros(2), np.zeros((2, 2), int), 3], ids=repr)
def test_what_is_no_flat_sequence_of_ints_is_refused(bad):
    with pytest.raises(ValueError, match=r"longest_common_token_prefix\(a=\.\.\.\) must be a flat sequence"):
        longest_common_token_prefix(bad, [1])
    with pytest.raises(ValueError, match=r"longest_common_token_prefix\(b=\.\.\.\) must be a flat sequence"):
        longest_common_token_prefix([1], bad)


def test_100k_tokens_are_compared_within_a_tenth_of_a_second():
    a = [i * 7919 % 150_000 for i in range(100_000)]
    b = [i * 7919 % 150_000 for i in range(100_000)]
    start = time.process_time()
    assert longest_common_token_prefix(a, b) == 100_000
    assert time.process_time() - start < 0.1  # about 11 ms
