"""Key spans as a picture; needs matplotlib, the extra `plot`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.spans.builder import KeySpans
from jaxinfer.spans.flags import ImageFlags, check_flags

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Key not read, read, read ahead of the query, and the query's own.
_COLOURS = ("#f4f4f2", "#5b8db8", "#d9822b", "#1f3b57")
_IMAGE_COLOUR = "#d9822b"


def draw_key_spans(
    spans: KeySpans,
    *,
    is_image: ImageFlags | None = None,
    kv_len: int | None = None,
    chunks: Iterable[tuple[int, int]] = (),
    first_query: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Returns the axes with the mask that one row's spans stand for: queries down, keys across.

    A key that is read is blue, one after the query orange: only an image run reads ahead. The query's own
    column is dark.

    Args:
      spans: int32 [T] each.
      is_image: bool [S], the columns of images among the keys, drawn as bars along both axes.
      kv_len: keys S; None: up to the last that is read.
      chunks: (start, end) of prefill chunks, end exclusive, drawn as lines below the last query of each.
      first_query: position of the first of the T queries.
      ax: where to draw; None: new axes.

    Raises:
      ValueError: spans of more than one row, or flags that do not fit.
      ImportError: matplotlib is missing.
    """
    try:
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(
            "draw_key_spans needs matplotlib, the extra `plot`: pip install 'jaxinfer[plot]'"
        ) from error
    classes = _classes(spans, kv_len, first_query)
    if ax is None:
        ax = plt.figure(figsize=(4.8, 4.8), layout="constrained").add_subplot()
    queries, keys = classes.shape
    ax.pcolormesh(
        np.arange(keys + 1) - 0.5,
        np.arange(queries + 1) - 0.5 + first_query,
        classes,
        cmap=ListedColormap(_COLOURS),
        vmin=0,
        vmax=len(_COLOURS) - 1,
        edgecolors="white",
        linewidth=0.5 if max(queries, keys) <= 64 else 0,
    )
    ax.set(xlabel="key", ylabel="query", aspect="equal")
    ax.invert_yaxis()
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if is_image is not None:
        _draw_runs(ax, _checked_flags(is_image, keys), first_query, queries)
    for _, end in chunks:
        if first_query < end < first_query + queries:
            ax.axhline(end - 0.5, color="#333333", linewidth=1.2, linestyle="--")
    return ax


def _classes(spans: KeySpans, kv_len: int | None, first_query: int) -> np.ndarray:
    """Returns an index into `_COLOURS` for each query and key, int [T, S]."""
    lo, hi = np.asarray(spans.lo), np.asarray(spans.hi)
    if lo.ndim != 1 or lo.shape != hi.shape or lo.size == 0:
        raise ValueError(
            f"draw_key_spans(spans=...) must be of one row, [T] with T at least 1; got {lo.shape} and "
            f"{hi.shape}; pass KeySpans(spans.lo[0], spans.hi[0])"
        )
    keys = max(int(hi.max()) + 1, 1) if kv_len is None else kv_len
    query = first_query + np.arange(lo.size)[:, None]
    key = np.arange(keys)[None]
    is_read = (key >= lo[:, None]) & (key <= hi[:, None])
    return np.select([~is_read, key == query, key > query], [0, 3, 2], default=1)


def _checked_flags(is_image: ImageFlags, keys: int) -> np.ndarray:
    flags = np.asarray(check_flags(is_image, "draw_key_spans", axes="[S]", rank=1))
    if flags.size != keys:
        raise ValueError(
            f"draw_key_spans(is_image=...) must be bool [{keys}], one flag a key; got {flags.shape}"
        )
    return flags


def _draw_runs(ax: Axes, flags: np.ndarray, first_query: int, queries: int) -> None:
    """Draws a bar above the keys, and left of the queries, of each image run."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    last = first_query + queries
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        ax.plot(
            [start - 0.4, end - 0.6],
            [first_query - 1.1] * 2,
            color=_IMAGE_COLOUR,
            linewidth=4,
            solid_capstyle="butt",
            clip_on=False,
        )
        top, bottom = max(start, first_query), min(end, last)
        if top < bottom:
            ax.plot(
                [-1.1] * 2,
                [top - 0.4, bottom - 0.6],
                color=_IMAGE_COLOUR,
                linewidth=4,
                solid_capstyle="butt",
                clip_on=False,
            )
