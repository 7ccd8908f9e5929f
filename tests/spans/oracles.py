"""Dense masks, run ends and chunk plans in plain NumPy, straight from their definitions.

Nothing here builds a span: whether a query reads a key is decided pair by pair.
"""

from __future__ import annotations

import numpy as np


def same_run(is_image: np.ndarray, a: int, b: int) -> bool:
    """True when columns a and b, and all between them, are image columns."""
    return bool(np.all(is_image[min(a, b) : max(a, b) + 1]))


def dense_mask(
    is_image: np.ndarray, *, bidirectional: bool, window: int | None, offset: int, kv_len: int
) -> np.ndarray:
    """Which of `kv_len` keys each of T columns reads, the first column at position `offset`: bool [T, S]."""
    q_len = is_image.shape[0]
    mask = np.zeros((q_len, kv_len), bool)
    for column in range(q_len):
        for key in range(kv_len):
            query = offset + column
            seen = key <= query
            if bidirectional and offset <= key < offset + q_len:
                seen = seen or same_run(is_image, column, key - offset)
            if window:
                seen = seen and key > query - window
            mask[column, key] = seen
    return mask


def ragged_ends(
    positions: np.ndarray, sequence_ids: np.ndarray, is_image: np.ndarray, *, bidirectional: bool
) -> np.ndarray:
    """The last key of each column in its own sequence, -1 for padding: int32 [C]."""
    columns = list(zip(sequence_ids.tolist(), positions.tolist(), is_image.tolist(), strict=True))
    images = {(sequence, position) for sequence, position, flag in columns if flag and bidirectional}
    ends = []
    for sequence, position, flag in columns:
        end = position
        while flag and (sequence, end + 1) in images:
            end += 1
        ends.append(end if sequence >= 0 else -1)
    return np.array(ends, np.int32)


def is_cut(is_image: np.ndarray, end: int) -> bool:
    """True when columns `end - 1` and `end` both exist and belong to one image run."""
    return 0 < end < is_image.shape[0] and same_run(is_image, end - 1, end)


def longest_run(is_image: np.ndarray) -> int:
    """Columns of the longest image run, 0 without one."""
    return max((len(run) for run in "".join("#" if flag else " " for flag in is_image).split()), default=0)


def greedy_chunks(is_image: np.ndarray, max_chunk: int) -> tuple[tuple[int, int], ...]:
    """From each start the furthest end within `max_chunk` that cuts no run; every run must fit."""
    chunks, start = [], 0
    while start < is_image.shape[0]:
        ends = range(start + 1, min(start + max_chunk, is_image.shape[0]) + 1)
        end = max(end for end in ends if not is_cut(is_image, end))
        chunks.append((start, end))
        start = end
    return tuple(chunks)
