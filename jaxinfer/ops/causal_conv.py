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
      history: [B, C, K - 1], the last K - 1 raw inputs, newest last; zeros before the first column.
      lengths: int32 [B], real columns of each row; None: all are real.

    Raises:
      ValueError: shapes that do not fit.
    """
    batch, q_len, channels = x.shape
    width = weight.shape[-1]
    for name, array, shape in (
        ("weight", weight, (channels, width)),
        ("history", history, (batch, channels, width - 1)),
        ("lengths", lengths, (batch,)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"causal_conv({name}=...) must be {shape} for x {x.shape}; got {array.shape}")
    if lengths is not None:
        real = jnp.arange(q_len, dtype=jnp.int32) < lengths[:, None]
        x = jnp.where(real[..., None], x, 0)
    columns = jnp.concatenate([jnp.swapaxes(history, 1, 2), x.astype(history.dtype)], axis=1)
    taps = weight.astype(jnp.float32)
    terms = (columns[:, j : j + q_len].astype(jnp.float32) * taps[:, j] for j in range(width))
    output = sum(terms, start=jnp.float32(0))
    if lengths is None:
        kept = columns[:, q_len:]
    else:
        rows = lengths[:, None] + jnp.arange(width - 1, dtype=jnp.int32)
        kept = jnp.take_along_axis(columns, rows[..., None], axis=1)
    return output, jnp.swapaxes(kept, 1, 2)
