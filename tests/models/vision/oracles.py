"""What the decoder gets of a prompt with images, in numpy: flags, positions, and the masks of its layers."""

from __future__ import annotations

import numpy as np


def image_flags(ids: np.ndarray, image_token_id: int) -> np.ndarray:
    """bool [T]."""
    return np.asarray(ids) == image_token_id


def mrope_positions(flags: np.ndarray, merged_grids: list[tuple[int, int]]) -> np.ndarray:
    """int [3, T]: text goes on by one on every axis; an image of h x w tokens that starts at c lies at T = c,
    H = c + row, W = c + column, and what follows it starts at c + max(h, w)."""
    out, at, grids, column = [], 0, iter(merged_grids), 0
    while column < len(flags):
        if not flags[column]:
            out.append([at, at, at])
            at, column = at + 1, column + 1
            continue
        rows, columns = next(grids)
        out += [[at, at + row, at + place] for row in range(rows) for place in range(columns)]
        at, column = at + max(rows, columns), column + rows * columns
    return np.array(out).T


def gemma_mask(flags: np.ndarray, window: int | None) -> np.ndarray:
    """bool [T, T]: key at or before the query, or in the query's image run; and not behind the window."""
    run = np.cumsum(np.diff(flags, prepend=False) & flags) * flags  # 1, 2, ... inside runs, 0 outside
    query, key = np.arange(len(flags))[:, None], np.arange(len(flags))[None]
    seen = (key <= query) | ((run[:, None] == run[None]) & flags[:, None] & flags[None])
    return seen if window is None else seen & (key > query - window)
