"""Which tiles of the score matrix the TPU kernel visits: a list of steps, made by XLA before the kernel runs.

A tile of queries may read from one source (a batch row) or from several (sequences of a paged cache).
Only the kv blocks that some span of the tile touches are in the list, so what no span touches is neither
computed nor fetched, and the grid is as long as the list.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.span_attention.blocks import spans_have_gap, tile_extents

# How a step reads its block; 0 is the dearest, because static profilers read prefetched scalars as zero.
MASKED_WITH_GAP, MASKED, INTERIOR, NOTHING = range(4)

# Two int32 words a step live in scalar memory beside the kernel's other scalars.
MAX_STEPS = 48 * 1024
_SOURCE_BITS = 15  # of the second word, the block has the rest


class Schedule(NamedTuple):
    """The steps of one head, in order: tiles ascending, and within a tile its kv blocks."""

    steps: jax.Array  # int32 [2, max_steps]; see `read_visit`
    hulls: jax.Array  # int32 [2, tiles * sources]: the lowest and highest row that the tile reads of a source
    num_steps: jax.Array | int  # how many of them are real


class Visit(NamedTuple):
    """What one step does, scalars."""

    tile: jax.Array | int
    source: jax.Array | int
    block: jax.Array | int
    kind: jax.Array | int
    first: jax.Array | bool  # of its tile
    last: jax.Array | bool


def read_visit(steps, step) -> Visit:
    """Returns step `step` of the table."""
    where, reads = steps[0, step], steps[1, step]
    return Visit(
        tile=where >> 4,
        source=reads & (2**_SOURCE_BITS - 1),
        block=reads >> _SOURCE_BITS,
        kind=where & 3,
        first=(where & 4) != 0,
        last=(where & 8) != 0,
    )


def max_steps(tiles: int, sources: int, blocks: int, columns: int) -> int:
    """Returns the most steps there can be: a column reads one source, so a tile has no more than columns."""
    return min(tiles * sources, max(columns, tiles)) * blocks


def make_schedule(
    lo: jax.Array, hi: jax.Array, *, kv_len: int, block_kv: int, limit: int, tiles_per_row: int | None
) -> Schedule:
    """Returns the steps for canonical spans int32 [tiles, sources, block_q].

    Args:
      lo, hi: spans of each tile in each of its sources; a query has a span in at most one of them.
      kv_len: rows of a source.
      block_kv: rows of a block.
      limit: `max_steps` of this call.
      tiles_per_row: tiles that read the same batch row (one source a tile); None: sources are sequences.
    """
    sources = lo.shape[1]
    blocks = -(-kv_len // block_kv)
    first_row = jnp.arange(blocks) * block_kv
    last_row = first_row + block_kv - 1
    touched = jnp.any((lo[..., None] <= last_row) & (first_row <= hi[..., None]), axis=2)
    extents = tile_extents(lo, hi, kv_len=kv_len, block_kv=block_kv)
    reads = jnp.sum(lo <= hi, axis=2)
    alone = reads == jnp.sum(reads, axis=1, keepdims=True)  # a query of another source would need masking
    interior = (extents.shared_lo[..., None] <= first_row) & (last_row <= extents.shared_hi[..., None])
    masked = jnp.where(spans_have_gap(lo, hi), MASKED_WITH_GAP, MASKED)[..., None]
    kind = jnp.where(interior & alone[..., None], INTERIOR, masked)
    idle = ~jnp.any(touched, axis=(1, 2))  # one step all the same, which writes zeros
    kind = kind.at[:, 0, 0].set(jnp.where(idle, NOTHING, kind[:, 0, 0]))
    touched = touched.at[:, 0, 0].set(touched[:, 0, 0] | idle)

    order = jnp.arange(touched.size, dtype=jnp.int32)
    order = lax.sort(jnp.where(touched.reshape(-1), order, touched.size))[:limit]
    num_steps = jnp.sum(touched, dtype=jnp.int32)
    held = jnp.minimum(order, touched.size - 1)
    tile, rest = held // (sources * blocks), held % (sources * blocks)
    source = rest // blocks if tiles_per_row is None else tile // tiles_per_row
    step = jnp.arange(order.size)
    differs = tile[1:] != tile[:-1]
    first = jnp.concatenate([jnp.ones(1, bool), differs])
    last = jnp.concatenate([differs, jnp.ones(1, bool)]) | (step == num_steps - 1)
    flags = kind.reshape(-1)[held] | first.astype(jnp.int32) << 2 | last.astype(jnp.int32) << 3
    table = jnp.stack([tile << 4 | flags, rest % blocks << _SOURCE_BITS | source])
    hulls = jnp.stack([jnp.min(lo, axis=2), jnp.max(hi, axis=2)]).reshape(2, -1)
    return Schedule(table, hulls, num_steps)


def too_large(tiles: int, sources: int, steps: int) -> str | None:
    """Returns why the table does not hold that many, None where it does."""
    if steps > MAX_STEPS:
        return f"its table holds {MAX_STEPS} visited tiles at most; this call may need {steps}"
    if sources >= 2**_SOURCE_BITS or tiles >= 2**27:
        return f"it takes fewer than {2**_SOURCE_BITS} batch rows or sequences; got {sources}"
    return None
