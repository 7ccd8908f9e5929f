"""A file mapped into memory, whose pages can be let go once they have been read."""

from __future__ import annotations

import mmap
from typing import BinaryIO

import numpy as np


class MappedFile:
    """The bytes of a file that is not empty, read-only.

    Pages that were read count as this process's resident memory while the mapping lives. Loading reads each
    once, so it lets them go: without that its peak is the parameters and the file.
    """

    def __init__(self, file: BinaryIO):
        self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data: np.ndarray = np.frombuffer(self._mapping, np.uint8)

    def let_go(self, part: np.ndarray) -> None:
        """Drops the pages wholly inside `part`, a view of `data`; reading it again maps them again."""
        if not hasattr(mmap, "MADV_DONTNEED"):  # no such call on this system
            return
        first = part.__array_interface__["data"][0] - self.data.__array_interface__["data"][0]
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (first + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, length)
