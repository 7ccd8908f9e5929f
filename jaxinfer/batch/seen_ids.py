"""Which ids have been used, in little memory: about 100 bytes for an id that a row brings, 1 for one that
is its line number."""

from __future__ import annotations

import hashlib
import json

from jaxinfer.batch.request import RowId


class SeenIds:
    """The ids of the rows so far; a string and an integer are never the same id."""

    def __init__(self) -> None:
        self._given: set[bytes] = set()
        self._is_line_number = bytearray(1)  # by line; there is no line 0

    def add(self, row_id: RowId, line: int) -> bool:
        """Takes the id of the next line and returns whether it is new.

        Lines come in order, none left out.
        """
        assert line == len(self._is_line_number)
        key = hashlib.blake2b(json.dumps(row_id).encode(), digest_size=16).digest()
        is_new = key not in self._given
        if isinstance(row_id, int) and 0 < row_id < line:
            is_new = is_new and not self._is_line_number[row_id]
        self._is_line_number.append(is_new and row_id == line)
        if is_new and row_id != line:
            self._given.add(key)
        return is_new
