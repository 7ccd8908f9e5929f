"""Token ids as plain tuples, and how far two of them agree.

Tokens are compared themselves, never by a hash of them: two different histories may share a hash.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

# Slices are compared in C; only the first one that differs is walked in Python.
_COMPARE_LEN = 1024


def as_int_tuple(values: Iterable[int], name: str) -> tuple[int, ...]:
    """Returns `values` (a sequence, or an integer array of rank 1) as a tuple of Python ints.

    Args:
        values: token ids or lengths.
        name: the argument in call form, for the error.

    Raises:
        ValueError: not a flat sequence of ints.
    """
    to_list = getattr(values, "tolist", None)  # an array: far faster than indexing its elements
    try:
        return tuple(map(operator.index, values if to_list is None else to_list()))
    except TypeError as error:
        raise ValueError(f"{name} must be a flat sequence of ints; got {error}") from error


def as_length(value: int, name: str) -> int:
    """Returns `value` as a Python int of at least 0; `name` is the argument in call form."""
    try:
        length = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        length = -1
    if length < 0:
        raise ValueError(f"{name} must be an int of at least 0; got {value!r}")
    return length


def longest_common_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many leading token ids `a` and `b` share: 0 where either is empty.

    `[5, 6, 7]` and `[5, 6, 9, 1]` share 2.

    Args:
        a: token ids, a flat sequence of ints or an integer array of rank 1.
        b: likewise; the two may be of different kinds.

    Raises:
        ValueError: one of them is not a flat sequence of ints.
    """
    first = as_int_tuple(a, "longest_common_token_prefix(a=...)")
    second = as_int_tuple(b, "longest_common_token_prefix(b=...)")
    return common_len(first, second)


def common_len(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Returns how many leading elements two tuples share."""
    limit = min(len(first), len(second))
    for start in range(0, limit, _COMPARE_LEN):
        end = min(start + _COMPARE_LEN, limit)
        if first[start:end] != second[start:end]:
            return next(i for i in range(start, end) if first[i] != second[i])
    return limit
