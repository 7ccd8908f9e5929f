"""The meaning of the gated delta rule: one column after another, plain jnp. Every form is tested against it.

Axes: B batch, T columns, nk key heads, nv value heads, dk and dv their dims. The state is float32 whatever
the inputs are: it sums over the whole past, and a bfloat16 sum would stop taking in new columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

NORM_EPS = 1e-6


def gated_delta_reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array,
    lengths: jax.Array | None,
    checkpoint_columns: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (output, final_state, checkpoint_states) by a scan over columns; see `gated_delta_chunk`."""
    query, key, value, log_decay, beta = real_columns(query, key, value, log_decay, beta, lengths)
    heads_per_key = value.shape[2] // key.shape[2]
    q = jnp.repeat(scaled_queries(query), heads_per_key, axis=2)
    k = jnp.repeat(unit_rows(key), heads_per_key, axis=2)

    def column(carry, inputs):
        state, saved = carry
        index, q, k, v, g, b = inputs
        state = jnp.exp(g)[..., None, None] * state
        read = _read(state, k)
        state = state + k[..., :, None] * (b[..., None] * (v - read))[..., None, :]
        if saved is not None:
            here = (checkpoint_columns == index + 1)[..., None, None, None]
            saved = jnp.where(here, state[:, None], saved)
        return (state, saved), _read(state, q)

    columns = tuple(jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, value, log_decay, beta))
    saved = checkpoints_before_scan(initial_state, checkpoint_columns, value.shape[1])
    indices = jnp.arange(value.shape[1], dtype=jnp.int32)
    (state, saved), outputs = lax.scan(column, (initial_state, saved), (indices, *columns))
    return jnp.moveaxis(outputs, 0, 1).astype(value.dtype), state, saved


def _read(state: jax.Array, row: jax.Array) -> jax.Array:
    return jnp.einsum("bhkv,bhk->bhv", state, row, precision=lax.Precision.HIGHEST)


def real_columns(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    lengths: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Returns the inputs with padding columns zeroed, whatever they held: decay 1, beta 0, output 0."""
    inputs = (query, key, value, log_decay, beta)
    if lengths is None:
        return inputs
    real = jnp.arange(value.shape[1], dtype=jnp.int32) < lengths[:, None]
    return tuple(jnp.where(real.reshape(*real.shape, *([1] * (x.ndim - 2))), x, 0) for x in inputs)


def unit_rows(x: jax.Array) -> jax.Array:
    """Returns `x / sqrt(sum(x^2) + 1e-6)` over the last axis, float32; zeros stay zeros."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPS)


def scaled_queries(query: jax.Array) -> jax.Array:
    """Returns the queries as they read the state: unit rows times dk^-0.5, float32."""
    return unit_rows(query) * query.shape[-1] ** -0.5


def checkpoints_before_scan(
    initial_state: jax.Array, checkpoint_columns: jax.Array | None, q_len: int
) -> jax.Array | None:
    """Returns what the checkpoints hold before any column: float32 [B, k, nv, dk, dv], or None for none.

    Column 0 is the initial state, -1 is zeros. A column that does not exist gives NaN rather than some other
    column's state.
    """
    if checkpoint_columns is None:
        return None
    columns = checkpoint_columns[..., None, None, None]
    exists = (columns >= -1) & (columns <= q_len)
    saved = jnp.where(columns == 0, initial_state[:, None], 0.0)
    return jnp.where(exists, saved, jnp.nan)
