"""Images behind placeholder tokens: when two of them are the same, and where their runs lie.

Placeholder ids are equal for any two images of one size, so they say nothing about the pixels: a span
compares equal only to a span at the same place with the same digest of the pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from jaxinfer.prefix.tokens import as_length


class ContentSpan(NamedTuple):
    """Columns `start` to `end` (exclusive) stand for one image with this digest; None: not known."""

    start: int
    end: int
    digest: Hashable | None


def as_content(
    content: Iterable[tuple[int, int, Hashable | None]], num_tokens: int, name: str
) -> tuple[ContentSpan, ...]:
    """Returns `content` as spans in ascending order, checked against `num_tokens` columns.

    Raises:
        ValueError: a span that is empty, reaches past the tokens or overlaps another, or a digest that is
            empty or unhashable; the message names `name`, the argument in call form.
    """
    spans = sorted((_as_span(item, num_tokens, name) for item in content), key=lambda span: span.start)
    for left, right in itertools.pairwise(spans):
        if right.start < left.end:
            raise ValueError(
                f"{name} must not overlap; got ({left.start}, {left.end}) and ({right.start}, {right.end})"
            )
    return tuple(spans)


def _as_span(item: tuple[int, int, Hashable | None], num_tokens: int, name: str) -> ContentSpan:
    """Returns one checked span."""
    try:
        start, end, digest = item
        hash(digest)
    except (TypeError, ValueError):
        message = f"{name} must hold (start, end, digest), the digest hashable; got {item!r}"
        raise ValueError(message) from None
    span = ContentSpan(as_length(start, name), as_length(end, name), digest)
    if not span.start < span.end <= num_tokens:
        raise ValueError(
            f"{name} must hold spans with start < end <= {num_tokens}, the tokens they stand for; "
            f"got ({start}, {end})"
        )
    if digest in ("", b""):
        raise ValueError(f"{name} got an empty digest at ({start}, {end}); pass None where it is unknown")
    return span


def first_unlike(a: Sequence[ContentSpan], b: Sequence[ContentSpan]) -> int | None:
    """Returns the first column at which the content differs or is not known to be equal, else None.

    That is the start of the first span without a digest, or without its equal on the other side.
    """
    unlike = {span for span in (*a, *b) if span.digest is None} | (set(a) ^ set(b))
    return min((span.start for span in unlike), default=None)


def image_runs(spans: Sequence[ContentSpan]) -> tuple[tuple[int, int], ...]:
    """Returns the runs `(start, end)` of image columns; images side by side are one run."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        if runs and runs[-1][1] == span.start:
            runs[-1] = (runs[-1][0], span.end)
        else:
            runs.append((span.start, span.end))
    return tuple(runs)


def cut_run_start(boundary: int, runs: Iterable[tuple[int, int]]) -> int | None:
    """Returns the start of a run that `boundary` lies strictly inside of, None where it cuts none."""
    return next((start for start, end in runs if start < boundary < end), None)
