"""The declared set of shapes: prompts go through few compiled programs, whatever their length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxinfer.spans.chunks import ImageRunTooLongError

MAX_CHUNK = 512  # columns of the largest prefill step
_MIN_CHUNK = 16
_PAD_ALWAYS = 64  # columns up to which a padded step costs less than a second call
_MIN_CAPACITY = 256


def plan_prefill_buckets(length: int, max_chunk: int = MAX_CHUNK) -> tuple[int, ...]:
    """Returns the column counts of the prefill steps for `length` tokens, powers of two.

    Full chunks first; the rest is padded up to the next power of two where that is at most a third more
    columns (or few), else its largest power of two goes first. So at most a third of the columns is
    padding, and there are no more shapes than powers of two up to the chunk.

    Args:
      length: tokens, at least 0.
      max_chunk: a power of two.
    """
    if max_chunk < 1 or max_chunk & (max_chunk - 1):
        raise ValueError(f"plan_prefill_buckets(max_chunk=...) must be a power of two; got {max_chunk}")
    sizes = [max_chunk] * (length // max_chunk)
    rest = length % max_chunk
    smallest = min(_MIN_CHUNK, max_chunk)
    while rest > 0:
        above = max(smallest, 1 << (rest - 1).bit_length())
        if above <= _PAD_ALWAYS or 4 * rest >= 3 * above:
            sizes.append(above)
            break
        sizes.append(above // 2)
        rest -= above // 2
    return tuple(sizes)


@dataclasses.dataclass(frozen=True)
class PrefillStep:
    """What one prefill step takes of each row.

    Attributes:
      size: its columns.
      starts: first column of each row, int32 [B].
      counts: columns of each row, int32 [B], at most `size`; the rest is padding.
    """

    size: int
    starts: np.ndarray
    counts: np.ndarray


def plan_prefill_steps(
    lengths: Sequence[int],
    max_chunk: int = MAX_CHUNK,
    *,
    whole_runs: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> list[PrefillStep]:
    """Returns the steps that prefill rows side by side, of the sizes of `plan_prefill_buckets`.

    Rows advance together; one with image runs that must stay whole takes less of a step that would cut one,
    and goes on from there in the next. A step grows beyond `max_chunk`, up to `MAX_CHUNK`, for a run that is
    longer.

    Args:
      lengths: tokens of each row.
      whole_runs: for each row (start, end) of the runs that no step may cut; None: there are none.

    Raises:
      ImageRunTooLongError: a run is longer than any step.
    """
    ends = np.asarray(lengths, np.int32)
    runs = whole_runs or [()] * len(ends)
    limit = max(max_chunk, MAX_CHUNK)
    for row_runs in runs:
        for start, end in row_runs:
            if end - start > limit:
                raise ImageRunTooLongError(end - start, limit, start)
    steps, starts = [], np.zeros(len(ends), np.int32)
    while (left := ends - starts).max(initial=0) > 0:
        size = plan_prefill_buckets(int(left.max()), max_chunk)[0]
        for row, row_runs in enumerate(runs):
            begun = next((end - start for start, end in row_runs if start == starts[row]), 0)
            if begun > size:
                size = 1 << (begun - 1).bit_length()
        counts = np.minimum(left, size).astype(np.int32)
        for row, row_runs in enumerate(runs):
            stop = starts[row] + counts[row]
            counts[row] = next((start for start, end in row_runs if start < stop < end), stop) - starts[row]
        steps.append(PrefillStep(size, starts, counts))
        starts = starts + counts
    return steps


def bucketed_capacity(length: int, limit: int) -> int:
    """Returns the capacity to allocate for `length` positions: a power of two, at least 256, or `limit`
    where that is less. Attention costs what the spans cover, not what the cache could hold."""
    return min(max(_MIN_CAPACITY, 1 << (length - 1).bit_length()), limit)
