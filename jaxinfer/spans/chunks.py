"""Where a prompt may be cut into prefill chunks: never inside an image run.

A query of a run reads forward to the run's end, so under VISION_BIDIRECTIONAL a run is prefilled in one
chunk. A model whose layers are all CAUSAL may cut anywhere: plan it with all flags False. Images side by
side, without a text column between them, are one run.
"""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxinfer.spans.flags import ImageFlags, check_flags


class ImageRunTooLongError(ValueError):
    """An image run does not fit in the largest prefill chunk.

    Attributes:
        run_len: columns of the run.
        max_chunk: columns of the largest chunk.
        start: column at which the run begins.
    """

    def __init__(self, run_len: int, max_chunk: int, start: int) -> None:
        super().__init__(run_len, max_chunk, start)
        self.run_len = run_len
        self.max_chunk = max_chunk
        self.start = start

    def __str__(self) -> str:
        return (
            f"plan_prefill_chunks(max_chunk={self.max_chunk}) must hold every image run whole; got a run of "
            f"{self.run_len} columns at column {self.start} against chunks of at most {self.max_chunk}; "
            f"raise max_chunk to at least {self.run_len}"
        )


def chunk_splits_image_run(is_image: ImageFlags, chunk_end: int | jax.Array | np.ndarray) -> bool | jax.Array:
    """Returns True iff a chunk that ends before column `chunk_end` cuts an image run.

    That is, iff `0 < chunk_end < n` and the flags at `chunk_end - 1` and `chunk_end` are both set::

        is_image        0  1  1  0
        chunk_end    0  1  2  3  4
        splits       F  F  T  F  F

    Args:
        is_image: bool [n], True for columns of images.
        chunk_end: an int or an int32 scalar, exclusive end of the chunk; any value is legal.

    Returns:
        A bool; a bool array [] where an argument is traced.

    Raises:
        ValueError: `is_image` is not bool [n], or `chunk_end` is not one int or int32.
    """
    flags = check_flags(is_image, "chunk_splits_image_run", axes="[n]", rank=1)
    end = chunk_end if isinstance(chunk_end, jax.Array) else np.asarray(chunk_end)
    if end.ndim or end.dtype not in (np.int32, np.int64):
        raise ValueError(
            f"chunk_splits_image_run(chunk_end=...) must be one int or int32; got {end.dtype} {end.shape}"
        )
    if isinstance(flags, Tracer) or isinstance(end, Tracer):
        return _cuts_between(jnp.asarray(flags), jnp.asarray(end))
    number = int(end)
    host = np.asarray(flags)
    return bool(0 < number < host.shape[0] and host[number - 1] and host[number])


def _cuts_between(flags: jax.Array, end: jax.Array) -> jax.Array:
    """The rule of `chunk_splits_image_run` on traced values: bool []."""
    if flags.shape[0] < 2:
        return jnp.zeros((), bool)
    cut_before = jnp.arange(1, flags.shape[0], dtype=end.dtype)  # one legal end a pair of neighbours
    return jnp.any((cut_before == jnp.broadcast_to(end, cut_before.shape)) & flags[:-1] & flags[1:])


def plan_prefill_chunks(is_image: ImageFlags, max_chunk: int) -> tuple[tuple[int, int], ...]:
    """Returns chunks `(start, end)`, end exclusive, that cover all columns in order and cut no image run.

    Each chunk is as long as `max_chunk` allows; one that would cut a run ends before the run. For
    `is_image = 0 0 1 1 1 0` and `max_chunk = 4`: `((0, 2), (2, 6))`.

    Host code: it reads the flags.

    Args:
        is_image: bool [n], True for columns of images; all False where no layer is VISION_BIDIRECTIONAL.
        max_chunk: columns a chunk may have, at least 1.

    Returns:
        The chunks, none of them empty; no chunk at all for n = 0.

    Raises:
        ImageRunTooLongError: a run is longer than `max_chunk` (a ValueError).
        ValueError: `is_image` is not bool [n] or is traced, or `max_chunk` is not an int of at least 1.
    """
    flags = check_flags(is_image, "plan_prefill_chunks", axes="[n]", rank=1)
    if isinstance(flags, Tracer):
        raise ValueError("plan_prefill_chunks(is_image=...) must be known on the host; got a traced array")
    size = _chunk_size(max_chunk)
    host = np.asarray(flags)
    run_starts, run_lens = _image_runs(host)
    for start, run_len in zip(run_starts, run_lens, strict=True):
        if run_len > size:
            raise ImageRunTooLongError(int(run_len), size, int(start))
    chunks: list[tuple[int, int]] = []
    start = 0
    while start < host.shape[0]:
        end = min(start + size, host.shape[0])
        if chunk_splits_image_run(host, end):
            # That run begins after `start`: it fits a chunk, and no chunk begins inside a run.
            end = int(run_starts[np.searchsorted(run_starts, end) - 1])
        chunks.append((start, end))
        start = end
    return tuple(chunks)


def _image_runs(flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where each image run starts, ascending, and its length in columns."""
    edges = np.diff(np.concatenate([[0], flags.astype(np.int8), [0]]))
    starts = np.flatnonzero(edges == 1)
    return starts, np.flatnonzero(edges == -1) - starts


def _chunk_size(max_chunk: int) -> int:
    """Returns `max_chunk` as a Python int of at least 1."""
    try:
        size = 0 if isinstance(max_chunk, bool) else operator.index(max_chunk)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(
            f"plan_prefill_chunks(max_chunk=...) must be an int of at least 1; got {max_chunk!r}"
        )
    return size
