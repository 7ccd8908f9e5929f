"""The gated delta rule in plain XLA: a chunked form for many columns and a step for one.

Within a chunk of C columns (Yang et al., "Gated Delta Networks", 2024, section 3.3), with unit keys k_i and
decays e^(g_i), let D_ij = e^(g_(j+1) + ... + g_i) for i >= j and 0 above. What column i writes,
d_i = beta_i (v_i - S_(i-1)^T k_i e^(g_i)), depends on the writes before it, which makes a unit lower
triangular system:

    (I + strict_lower(beta K K^T * D)) Delta = beta (V - e^G * (K S))
    out = e^G * (Q S) + (Q K^T * D) Delta
    S' = e^(G_C) S + K^T (D_C * Delta)

Every exponent is a sum of log decays, so at most zero; and is summed over its own columns alone, never taken
as a difference of two running totals, which would lose what the totals have in common.

The r = nv / nk value heads of a key head lie side by side, [dk, r * dv], so keys are never repeated.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gated_delta.reference import (
    checkpoints_before_scan,
    real_columns,
    scaled_queries,
    unit_rows,
)

_MAX_CHUNK = 64
_MIN_CHUNK = 8


def gated_delta_chunk_xla(
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
    """Returns (output, final_state, checkpoint_states) by a scan over chunks; see `gated_delta_chunk`."""
    batch, q_len, num_value_heads, value_dim = value.shape
    num_key_heads, key_dim = key.shape[2:]
    groups = num_value_heads // num_key_heads
    chunk = min(_MAX_CHUNK, max(_MIN_CHUNK, 1 << (q_len - 1).bit_length()))
    num_chunks = -(-q_len // chunk)
    padding = num_chunks * chunk - q_len

    def chunks(x: jax.Array, *heads: int) -> jax.Array:
        # [B, T, heads, ...] -> [num_chunks, B, heads..., C, ...]; zero columns change nothing.
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, padding), *([(0, 0)] * (x.ndim - 2))))
        x = x.reshape(batch, num_chunks, chunk, *heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))

    query, key, value, log_decay, beta = real_columns(query, key, value, log_decay, beta, lengths)
    inputs = (
        jnp.arange(num_chunks, dtype=jnp.int32),
        chunks(scaled_queries(query), num_key_heads),
        chunks(unit_rows(key), num_key_heads),
        chunks(value, num_key_heads, groups),
        chunks(log_decay, num_key_heads, groups),
        chunks(beta, num_key_heads, groups),
    )

    def body(carry, xs):
        state, saved = carry
        index, *columns = xs
        out, state_after = _chunk(state, *columns)
        if saved is not None:
            saved = _save(saved, checkpoint_columns - index * chunk, state_after)
        return (state_after(None, chunk), saved), out

    shape = (batch, num_key_heads, groups, key_dim, value_dim)
    state = _side_by_side(initial_state.reshape(shape))
    saved = checkpoints_before_scan(initial_state, checkpoint_columns, q_len)
    (state, saved), out = lax.scan(body, (state, saved), inputs)
    state = _apart(state, groups).reshape(initial_state.shape)
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, num_chunks * chunk, num_value_heads, value_dim)
    return out[:, :q_len].astype(value.dtype), state, saved
