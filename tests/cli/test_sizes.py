"""Bytes as people write and read them."""

import argparse

import pytest

from jaxinfer.cli.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000", 1000),
        ("12B", 12),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("500 MB", 500_000_000),
        ("1.5kB", 1500),
        (" 3TiB ", 3 * 2**40),
    ],
)
def test_a_size_is_a_number_and_a_unit(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 G", "2GB2", "1e9", "nan", "2,5GB"])
def test_anything_else_is_refused_with_examples(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size: write for example 2GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (2 * 2**30, "2.1 GB"),
        (5 * 10**12, "5.0 TB"),
    ],
)
def test_bytes_are_shown_with_a_decimal_unit(count, expected):
    assert format_bytes(count) == expected
