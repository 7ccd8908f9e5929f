"""Bytes as people write and read them."""

from __future__ import annotations

import argparse
import math
import re

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = _DECIMAL | _BINARY
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Returns the bytes of "2GiB", "500 MB" or "1000"; for argparse's `type`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write for example 2GiB, 500MB or 1000000")
    return math.floor(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(count: int) -> str:
    """Returns a count of bytes with three digits or so: "98.4 MB"."""
    for unit in ("TB", "GB", "MB", "kB"):
        if count >= _DECIMAL[unit.upper()]:
            return f"{count / _DECIMAL[unit.upper()]:.1f} {unit}"
    return f"{count} B"
