"""The gated delta rule in plain XLA: a chunked form for many columns and a step for one.

Within a chunk of C columns (Yang et al., "Gated Delta Networks", 2024, section 3.3) with unit keys k_i and
log decays g_i, let D_ij = e^(g_(j+1) + ... + g_i) for i >= j and 0 above, G_i = g_1 + ... + g_i. What column
i writes depends on what the columns before it wrote, a unit lower triangular system:

    (I + strict_lower(beta K K^T * D)) W = beta (V - e^G * (K S))
    out = e^G * (Q S) + (Q K^T * D) W
    S'  = e^(G_C) S + K^T (D_C * W)

Every exponent is a sum of log decays, at most zero, and sums its own columns only: a difference of two
running totals would lose what the totals have in common (1e-4 after 64 columns of decay 1e-12).

The r = nv / nk value heads of one key head lie side by side in the state, [dk, r * dv], and share its keys
and queries, which are never repeated.
"""

from __future__ import annotations

from typing import NamedTuple

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

_MIN_CHUNK, _MAX_CHUNK = 8, 32  # powers of two; 64 is slower: its products within the chunk outweigh
ZERO_LOG_DECAY = -150.0  # its float32 exponential is 0, and unlike -inf it can be summed by a product
_LEAST_DOT = 8  # products of smaller blocks are sums that XLA fuses, larger ones are dots


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
    columns = real_columns(query, key, value, log_decay, beta, lengths)
    columns = tuple(_chunks(x, chunk) for x in columns)
    num_chunks = columns[0].shape[0]

    def scan_chunk(carry, xs):
        state, saved = carry
        index, *columns = xs
        out, writes = _chunk(state, *columns)
        if saved is not None:
            saved = _save(saved, checkpoint_columns - index * chunk, state, writes)
        return (_state_after(state, writes, chunk - 1), saved), out.astype(value.dtype)

    state = _side_by_side(initial_state.reshape(batch, num_key_heads, groups, key_dim, value_dim))
    saved = checkpoints_before_scan(initial_state, checkpoint_columns, q_len)
    if checkpoint_columns is not None:
        # The scan goes on to the end of the last chunk; columns past the real ones must not be found there.
        checkpoint_columns = jnp.where(checkpoint_columns > q_len, -1, checkpoint_columns)
    indices = jnp.arange(num_chunks, dtype=jnp.int32)
    (state, saved), out = lax.scan(scan_chunk, (state, saved), (indices, *columns))
    state = _apart(state, groups).reshape(initial_state.shape)
    out = jnp.swapaxes(out, 0, 1).reshape(batch, num_chunks * chunk, num_value_heads, value_dim)
    return out[:, :q_len], state, saved


class _Writes(NamedTuple):
    """What one chunk adds to the state; row i of the decays is as of column i.

    Attributes:
      key: [B, nk, C, dk].
      value: W, [B, nk, r, C, dv].
      decay: D, [B, nk, r, C, C].
      from_start: e^G, [B, nk, r, C].
    """

    key: jax.Array
    value: jax.Array
    decay: jax.Array
    from_start: jax.Array


def _chunk(
    state: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
) -> tuple[jax.Array, _Writes]:
    """Returns (output float32 [B, C, nv, dv], what the chunk writes).

    Args:
      state: [B, nk, dk, r * dv].
      query, key: [B, C, nk, dk], as they came; value: [B, C, nv, dv]; log_decay, beta: [B, C, nv].
    """
    batch, chunk, num_key_heads, _ = key.shape
    heads = (num_key_heads, value.shape[2] // num_key_heads)
    query, key = _heads_first(scaled_queries(query), heads[:1]), _heads_first(unit_rows(key), heads[:1])
    value, log_decay, beta = (_heads_first(x, heads) for x in (value, log_decay, beta))
    both = jnp.concatenate([key, query], axis=-2)  # one product of 2 C rows is faster than two of C
    products = _dot(both, jnp.swapaxes(key, -1, -2))[:, :, None]  # [B, nk, 1, 2 C, C]
    key_products, query_products = products[..., :chunk, :], products[..., chunk:, :]
    decay, from_start = _decays(log_decay)
    system = jnp.where(_below(chunk), beta[..., None] * key_products * decay, 0)

    reads = _dot(both, state)
    key_reads, query_reads = (_apart(x, heads[1]) for x in jnp.split(reads, 2, axis=-2))
    residual = beta[..., None] * (value - from_start[..., None] * key_reads)
    written = _dot(_unit_lower_inverse(system), residual)
    out = from_start[..., None] * query_reads + _dot(query_products * decay, written)
    out = jnp.moveaxis(out, 3, 1).reshape(batch, chunk, heads[0] * heads[1], -1)
    return out, _Writes(key, written, decay, from_start)


def _state_after(state: jax.Array, writes: _Writes, row: int | jax.Array) -> jax.Array:
    """Returns the state after the chunk's column `row`, [B, nk, dk, r * dv]."""
    kept = writes.from_start[..., row, None, None]  # [B, nk, r, 1, 1]
    kept = _side_by_side(jnp.broadcast_to(kept, (*kept.shape[:3], 1, writes.value.shape[-1])))
    written = _side_by_side(writes.decay[..., row, :, None] * writes.value)  # [B, nk, C, r * dv]
    return kept * state + _dot(jnp.swapaxes(writes.key, -1, -2), written)


def _save(saved: jax.Array, columns: jax.Array, state: jax.Array, writes: _Writes) -> jax.Array:
    """Returns the checkpoints with those that this chunk reaches; a chunk that reaches none costs a test.

    Args:
      saved: [B, k, nv, dk, dv]; columns: int32 [B, k], counted from the chunk's start.
      state: before the chunk.
    """
    reached = (columns >= 1) & (columns <= writes.value.shape[-2])
    slots = columns.shape[1]

    def save_one(pair, saved):
        row, slot = pair // slots, pair % slots

        def save(saved):
            own_state, own_writes = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row), (state, writes))
            after = _apart(_state_after(own_state, own_writes, columns[row, slot] - 1), writes.value.shape[2])
            return saved.at[row, slot].set(after.reshape(saved.shape[2:]))

        return lax.cond(reached[row, slot], save, lambda saved: saved, saved)

    def save_all(saved):
        return lax.fori_loop(0, columns.size, save_one, saved)

    return lax.cond(jnp.any(reached), save_all, lambda saved: saved, saved)


def _decays(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (D [..., C, C], e^G [..., C]) of log decays [..., C]."""
    below = _below(log_decay.shape[-1])
    log_decay = jnp.maximum(log_decay, ZERO_LOG_DECAY)
    upto = jnp.where(below.T, 0, log_decay[..., None, :])  # row i holds g_m at m <= i
    sums = _dot(upto, jnp.asarray(below, jnp.float32))  # over j < m <= i
    decay = jnp.where(below.T, 0, jnp.exp(sums))
    return decay, jnp.exp(sums[..., 0] + log_decay[..., :1])


def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Returns (I + lower)^-1 of strictly lower triangular [..., C, C], C a power of two.

    Blocks on the diagonal are inverted and joined in pairs, each twice the size of the last:
    [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]]. As stable as forward substitution; powers of
    `lower`, another way, cancel terms of 1e17 where keys repeat.
    """
    *lead, size, _ = lower.shape
    inverse = jnp.ones((*lead, size, 1, 1), lower.dtype)
    block = 1
    while block < size:
        pairs = size // (2 * block)
        tiles = lower.reshape(*lead, pairs, 2, block, pairs, 2, block)[..., 1, :, :, 0, :]
        own = np.eye(pairs, dtype=bool)[:, None, :, None]  # as a masked sum it compiles to one small loop
        corner = jnp.sum(jnp.where(own, tiles, 0), axis=-2)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_block_product(_block_product(second, corner), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]


def _block_product(left: jax.Array, right: jax.Array) -> jax.Array:
    if left.shape[-1] < _LEAST_DOT:
        return jnp.sum(left[..., :, :, None] * right[..., None, :, :], axis=-2)
    return _dot(left, right)


def gated_delta_step_xla(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array,
    lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (output, the state after the one column); see `gated_delta_step`."""
    column = step_inputs(query, key, value, log_decay, beta, lengths)
    out, state = advance(column, initial_state)
    return out[:, None].astype(value.dtype), state


def step_inputs(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    lengths: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Returns one column as the rule uses it, float32: scaled queries and unit keys [B, nv, dk], values
    [B, nv, dv], decays and beta [B, nv]."""
    groups = value.shape[2] // key.shape[2]
    columns = real_columns(query, key, value, log_decay, beta, lengths)
    query, key, value, log_decay, beta = (x[:, 0].astype(jnp.float32) for x in columns)
    query, key = (jnp.repeat(x, groups, axis=1) for x in (scaled_queries(query), unit_rows(key)))
    return query, key, value, jnp.exp(log_decay), beta


def advance(column: tuple[jax.Array, ...], state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (output [B, nv, dv], state [B, nv, dk, dv]) after the column of `step_inputs`.

    The updated state's readout is taken from the old one, S'^T q = e^g S^T q + <k, q> w, so that one pass
    reads the state for both products and one pass updates it, in place where the caller donates it.
    """
    query, key, value, decay, beta = column
    decay, beta = decay[..., None], beta[..., None]
    reads = decay[..., None] * _dot(jnp.stack([key, query], axis=2), state)  # [B, nv, 2, dv]
    written = beta * (value - reads[:, :, 0])
    out = reads[:, :, 1] + jnp.sum(key * query, axis=-1, keepdims=True) * written
    return out, decay[..., None] * state + key[..., :, None] * written[..., None, :]


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns `left @ right` over the last two axes, in full float32 on every device."""
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _below(size: int) -> np.ndarray:
    """Returns the mask of the entries below the diagonal, bool [size, size]."""
    return np.tri(size, k=-1, dtype=bool)


def _chunks(x: jax.Array, chunk: int) -> jax.Array:
    """Returns [B, T, ...] as [num_chunks, B, C, ...]; columns added are zeros, which change nothing."""
    batch, q_len = x.shape[:2]
    num_chunks = -(-q_len // chunk)
    x = jnp.pad(x, ((0, 0), (0, num_chunks * chunk - q_len), *[(0, 0)] * (x.ndim - 2)))
    return jnp.swapaxes(x.reshape(batch, num_chunks, chunk, *x.shape[2:]), 0, 1)


def _heads_first(x: jax.Array, heads: tuple[int, ...]) -> jax.Array:
    """Returns [B, C, heads, ...] as float32 [B, *heads, C, ...]."""
    x = x.astype(jnp.float32).reshape(*x.shape[:2], *heads, *x.shape[3:])
    return jnp.moveaxis(x, 1, 1 + len(heads))


def _side_by_side(x: jax.Array) -> jax.Array:
    """Returns [B, nk, r, rows, dv] as [B, nk, rows, r * dv]."""
    x = jnp.swapaxes(x, 2, 3)
    return x.reshape(*x.shape[:3], -1)


def _apart(x: jax.Array, groups: int) -> jax.Array:
    """Returns [B, nk, rows, r * dv] as [B, nk, r, rows, dv]."""
    return jnp.swapaxes(x.reshape(*x.shape[:3], groups, -1), 2, 3)
