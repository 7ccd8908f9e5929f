"""Key/value rows as arrays: what attention reads of a layer, and how rows are written and moved.

Layout [B, K, S, H]: the last two axes are what a TPU tiles, and a head's rows are contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """What a step's queries attend over: rows and spans in row numbers.

    key, value: [B, K, S, H]; lo, hi: int32 [B, T], inclusive; empty where hi < lo.
    """

    key: jax.Array
    value: jax.Array
    lo: jax.Array
    hi: jax.Array


def write_rows(buffer: jax.Array, new: jax.Array, start: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns `buffer` with the first `lengths[b]` rows of `new[b]` at row `start[b]`.

    Rows that would fall outside the buffer are dropped, never moved: a clamped update would overwrite
    rows that are alive.

    Args:
      buffer: [B, K, S, H]; new: [B, K, T, H], cast to the buffer's dtype; start, lengths: int32 [B].
    """
    batch, _, num_rows, _ = buffer.shape
    column = jnp.arange(new.shape[2], dtype=jnp.int32)
    row = jnp.where(column < lengths[:, None], start[:, None] + column, num_rows)
    batch_index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    # Index arrays on axes 0 and 2 put their own axes first: the updates are [B, T, K, H].
    updates = jnp.swapaxes(new, 1, 2).astype(buffer.dtype)
    return buffer.at[batch_index, :, row].set(updates, mode="drop")


def shift_rows(buffer: jax.Array, shift: jax.Array, num_rows: int) -> jax.Array:
    """Returns rows `shift[b]` to `shift[b] + num_rows - 1` of each batch row: [B, K, num_rows, H].

    Rows past the buffer's end repeat its last row; they are beyond every span.
    """
    index = jnp.minimum(shift[:, None] + jnp.arange(num_rows), buffer.shape[2] - 1)
    return jnp.take_along_axis(buffer, index[:, None, :, None], axis=2)
