"""The input file as lines and windows of lines: read as a stream, never whole.

A window is a run of consecutive rows that is planned, answered and written together. Where windows end is a
function of the file and the window's size alone, so that a job which is killed and goes on has the same ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_LINE_BYTES = 16 << 20
_WINDOW_BYTES = 64 << 20
_READ_BYTES = 1 << 20

Lines = list[tuple[int, bytes]]  # line numbers from 1 and what the lines hold, without the newline


@dataclasses.dataclass(frozen=True)
class InputFacts:
    """What was found in an input file.

    Attributes:
      sha256: of its bytes, in hex.
      num_rows: its lines; a newline at the very end begins no row.
      version: tells whether the file has been touched since.
    """

    sha256: str
    num_rows: int
    version: tuple[int, int]

    def check_unchanged(self, path: Path) -> None:
        """Raises ValueError when the file is no longer the one that was scanned."""
        if _version(path) != self.version:
            raise ValueError(f"{path} has changed while the job was reading it; start anew with --overwrite")


def scan_input(path: Path) -> InputFacts:
    """Returns the facts of a file, in one pass over it.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no regular file: a job reads its input twice, and again after a kill.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is not a regular file; a job must be able to read its input again")
    version = _version(path)
    digest, newlines, last = hashlib.sha256(), 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            newlines += block.count(b"\n")
            last = block[-1:]
    return InputFacts(digest.hexdigest(), newlines + (last != b"\n"), version)


def _version(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file without their newlines; of one above `MAX_LINE_BYTES` only the beginning,
    one byte longer than that."""
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(_READ_BYTES)):
                pass
            yield line.removesuffix(b"\n")


def windows(lines: Iterable[bytes], num_rows: int) -> Iterator[Lines]:
    """Yields the lines in runs of `num_rows`, fewer where these are very long."""
    window: Lines = []
    num_bytes = 0
    for number, line in enumerate(lines, 1):
        window.append((number, line))
        num_bytes += len(line)
        if len(window) == num_rows or num_bytes >= _WINDOW_BYTES:
            yield window
            window, num_bytes = [], 0
    if window:
        yield window
