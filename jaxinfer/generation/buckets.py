"""The declared set of shapes: prompts go through few compiled programs, whatever their length."""

from __future__ import annotations

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


def bucketed_capacity(length: int, limit: int) -> int:
    """Returns the capacity to allocate for `length` positions: a power of two, at least 256, or `limit`
    where that is less. Attention costs what the spans cover, not what the cache could hold."""
    return min(max(_MIN_CAPACITY, 1 << (length - 1).bit_length()), limit)
