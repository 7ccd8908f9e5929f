"""Depthwise causal convolution over columns, with the columns before them carried as a history."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def causal_conv(
    x: jax.Array, weight: jax.Array, *, history: jax.Array, lengths: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns (output float32 [B, T, C], the history after the row's real columns).

        output[t, c] = sum_j weight[c, j] * x[t - (K - 1) + j, c]

    with the history standing for the columns before the first. Inputs are rounded to the history's dtype
    before use: a column gives the same whether it is read from `x` or, a call later, from the history.

    Args:
      x: [B, T, C], raw inputs. Padding columns reach neither the history nor a real column's output, whatever
        they hold; their own output holds no meaning.
      weight: [C, K].
      history: [B, K - 1, C], the last K - 1 raw inputs, newest last; zeros before the first column.
      lengths: int32 [B], real columns of each row; None: all are real.

    Raises:
      ValueError: shapes that do not fit.
    """
    batch, q_len, channels = x.shape
    width = weight.shape[-1]
    for name, array, shape in (
        ("weight", weight, (channels, width)),
        ("history", history, (batch, width - 1, channels)),
        ("lengths", lengths, (batch,)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"causal_conv({name}=...) must be {shape} for x {x.shape}; got {array.shape}")
    if lengths is not None:
        real = jnp.arange(q_len, dtype=jnp.int32) < lengths[:, None]
        x = jnp.where(real[..., None], x, 0)
    columns = jnp.concatenate([history, x.astype(history.dtype)], axis=1)
    taps = weight.astype(jnp.float32)
    terms = (columns[:, j : j + q_len].astype(jnp.float32) * taps[:, j] for j in range(width))
    output = sum(terms, start=jnp.float32(0))
    if lengths is None:
        return output, columns[:, q_len:]
    return output, conv_history(x, history=history, after=lengths[:, None])[:, 0]


def conv_history(x: jax.Array, *, history: jax.Array, after: jax.Array) -> jax.Array:
    """Returns the histories of `causal_conv` after its first `after[b, i]` columns, [B, k, K - 1, C].

    Args:
      x: [B, T, C]; history: [B, K - 1, C], as for `causal_conv`.
      after: int32 [B, k], each in 0..T and no more than the row's real columns.
    """
    columns = jnp.concatenate([history, x.astype(history.dtype)], axis=1)
    rows = after[..., None] + jnp.arange(history.shape[1], dtype=jnp.int32)  # [B, k, K - 1]
    flat = rows.reshape(rows.shape[0], -1, 1)
    return jnp.take_along_axis(columns, flat, axis=1).reshape(*rows.shape, x.shape[-1])
