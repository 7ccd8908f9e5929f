"""Reductions over a vocabulary in two steps: whole blocks first, then inside the one block that matters.

On CPUs a position found this way costs a fraction of a plain argmax or cumulative sum (at 262144 tokens 1 ms
against 9 ms for eight rows): the first step is a vector reduction, and the second reads one block a row.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 1024
_SIDE = 32  # XLA's CPU backend fuses reductions of at most 32 elements an axis with what feeds them

_SIGN = np.uint32(1 << 31)
_INFINITY = np.uint32(0x7F800000)


def reduce_blocks(rows: jax.Array, reduce: Callable[..., jax.Array]) -> jax.Array:
    """Returns [B, V / 1024 rounded up]: `reduce(part, axis=axes)` over each block of rows [B, V]."""
    batch, size = rows.shape
    whole = size - size % BLOCK
    parts = [reduce(rows[:, :whole].reshape(batch, -1, _SIDE, _SIDE), axis=(-2, -1))] if whole else []
    if whole < size:
        parts.append(reduce(rows[:, whole:], axis=-1)[:, None])
    return jnp.concatenate(parts, axis=-1)


def block_at(rows: jax.Array, block: jax.Array, *, fill: float) -> jax.Array:
    """Returns [B, 1024], block number `block` int32 [B] of rows [B, V]; `fill` past the end of a row."""
    ids = block[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    return jnp.take_along_axis(rows, ids, axis=-1, mode="fill", fill_value=fill)


def first_true(mask: jax.Array) -> jax.Array:
    """Returns int32 [...], the lowest true position of the last axis; its size when there is none."""
    size = mask.shape[-1]
    return jnp.min(jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size), axis=-1)


def sort_key(logits: jax.Array) -> jax.Array:
    """Returns uint32 in the order of float32 values: -0 and 0 share a key, every NaN has the greatest."""
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    magnitude = bits & ~_SIGN
    key = jnp.where((bits >= _SIGN) & (magnitude > 0), ~bits, magnitude | _SIGN)
    return jnp.where(magnitude > _INFINITY, ~jnp.uint32(0), key)


def greatest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the greatest of logits [B, V] as float32 [B], NaN when any is, and its lowest id int32 [B]."""
    # By keys, since a float maximum loses NaN on some backends: XLA's CPU backend prefers a fast one.
    keys = sort_key(logits)
    tops = reduce_blocks(keys, jnp.max)
    best = jnp.max(tops, axis=-1)
    block = first_true(tops == best[:, None])
    inside = block_at(keys, block, fill=0)
    bits = jnp.where(best >= _SIGN, best & ~_SIGN, ~best)
    return (
        jax.lax.bitcast_convert_type(bits, jnp.float32),
        block * BLOCK + first_true(inside == best[:, None]),
    )
