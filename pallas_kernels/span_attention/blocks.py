"""How spans cut the score matrix into tiles: what each tile may read, shared by every blocked form.

A tile is `block_q` queries of one batch row. Its kv blocks are numbered from row 0, `block_kv` rows
each. Spans here are canonical: clipped to the rows that exist, an empty one being (kv_len, -1), so
that minima and maxima over a tile pass over it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TileExtents(NamedTuple):
    """What a tile of queries reads, each int32 [...] with one entry a tile."""

    first_block: jax.Array  # the first kv block that holds a row of some span
    end_block: jax.Array  # one past the last such block; equals first_block where every span is empty
    shared_lo: jax.Array  # rows shared_lo..shared_hi lie in every span of the tile that is not empty
    shared_hi: jax.Array


def canonical_spans(span_lo: jax.Array, span_hi: jax.Array, kv_len: int) -> tuple[jax.Array, jax.Array]:
    """Returns int32 spans cut to rows 0..kv_len-1, empty ones as (kv_len, -1)."""
    lo = jnp.maximum(span_lo.astype(jnp.int32), 0)
    hi = jnp.minimum(span_hi.astype(jnp.int32), kv_len - 1)
    empty = hi < lo
    return jnp.where(empty, kv_len, lo), jnp.where(empty, -1, hi)


def tile_extents(lo: jax.Array, hi: jax.Array, *, kv_len: int, block_kv: int) -> TileExtents:
    """Returns what the tiles read, reducing over the last axis of canonical spans [..., block_q]."""
    empty = hi < lo
    first = jnp.min(lo, axis=-1) // block_kv
    end = jnp.max(hi, axis=-1) // block_kv + 1  # -1 // block_kv + 1 == 0
    return TileExtents(
        first_block=jnp.minimum(first, end),
        end_block=end,
        shared_lo=jnp.max(jnp.where(empty, 0, lo), axis=-1),
        shared_hi=jnp.min(jnp.where(empty, kv_len - 1, hi), axis=-1),
    )


def may_hold_unread_rows(lo: jax.Array, hi: jax.Array, *, kv_len: int, block_kv: int) -> jax.Array:
    """Returns int32 [B, kv blocks], 0 where every row of the block lies in some span of its batch row.

    Of canonical spans [B, T]. It is 1 where one span, or two that meet, do not hold the whole block, though
    several might: a sum over all pairs of spans and rows would cost more than the blocks it spares.
    """
    first = jnp.arange(-(-kv_len // block_kv), dtype=jnp.int32) * block_kv
    last = jnp.minimum(first + block_kv, kv_len) - 1
    lo, hi = lo[..., None], hi[..., None]
    held_to = jnp.max(jnp.where(lo <= first, hi, -1), axis=1)
    held_from = jnp.min(jnp.where(hi >= last, lo, kv_len), axis=1)
    return (held_from > held_to + 1).astype(jnp.int32)


def spans_have_gap(lo: jax.Array, hi: jax.Array) -> jax.Array:
    """Returns whether rows between a tile's first and last lie in no span, bool [...]; canonical spans."""
    order = jnp.argsort(lo, axis=-1)
    lo, hi = jnp.take_along_axis(lo, order, axis=-1), jnp.take_along_axis(hi, order, axis=-1)
    reached = jax.lax.cummax(hi, axis=hi.ndim - 1)
    return jnp.any((lo[..., 1:] > reached[..., :-1] + 1) & (lo <= hi)[..., 1:], axis=-1)
