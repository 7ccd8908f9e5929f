"""Span attention in plain XLA for a few queries a batch row: decode.

One pass over the rows between the lowest and the highest key that any query reads, with no loop: a CPU runs
the operations inside a loop on one thread. The length of that stretch has to be static, so one of a few
lengths is chosen, each twice the last; time follows the spans within a factor of two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import target_platform

_MIN_LENGTH = 512
# XLA's CPU product for bfloat16 is pathological with fewer rows.
_MIN_BF16_ROWS = 8


def attend_few_queries(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    sinks: jax.Array | None,
    *,
    softmax_scale: float,
    logits_soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, N, H] and the log of the softmax denominator [B, T, N], float32.

    Arguments are the reference's, spans clipped to the rows there are; an empty span has hi < lo.
    """
    kv_len = key.shape[2]
    lengths = _lengths(kv_len)
    reads = lo <= hi
    first = jnp.min(jnp.where(reads, lo, kv_len))
    needed = jnp.max(jnp.where(reads, hi, -1)) + 1 - first
    stacked = _stack_heads(query, key.shape[1])

    def over(length: int):
        def branch():
            start = jnp.clip(first, 0, kv_len - length)
            rows = (start, length)
            return _attend(stacked, key, value, lo, hi, sinks, rows, softmax_scale, logits_soft_cap)

        return branch

    choice = sum(((needed > length).astype(jnp.int32) for length in lengths[:-1]), jnp.int32(0))
    out, lse = lax.switch(choice, [over(length) for length in lengths])
    return _unstack_heads(out, query.shape), _unstack_heads(lse[..., None], query.shape)[..., 0]


def _lengths(kv_len: int) -> list[int]:
    lengths = [kv_len]
    length = _MIN_LENGTH
    shorter = []
    while length < kv_len:
        shorter.append(length)
        length *= 2
    return shorter + lengths


def _attend(stacked, key, value, lo, hi, sinks, rows, softmax_scale, logits_soft_cap):
    """Returns output [B, K, R, H] and log denominator [B, K, R] over some rows; R = G * T."""
    start, length = rows
    batch, num_kv_heads, num_rows, head_dim = stacked.shape
    groups = num_rows // lo.shape[1]
    size = (batch, num_kv_heads, length, head_dim)
    keys, values = (lax.dynamic_slice(cache, (0, 0, start, 0), size) for cache in (key, value))
    index = start + jnp.arange(length)
    mask = (index >= lo[..., None]) & (index <= hi[..., None])  # [B, T, length]
    values = jnp.where(jnp.any(mask, axis=1)[:, None, :, None], values, 0)  # 0 * NaN is NaN
    mask = jnp.tile(mask, (1, groups, 1))[:, None]  # rows of a head are [G, T]
    scores = _product(stacked, keys, contract=(3, 3)) * softmax_scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(num_kv_heads, groups)
        sink = jnp.repeat(sink, lo.shape[1], axis=1)[None, :, :, None]
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sink - top)
    out = _product(weights.astype(values.dtype), values, contract=(3, 2))
    reads = jnp.any(mask, axis=-1, keepdims=True)
    total = jnp.where(reads, total, 1.0)
    out = jnp.where(reads, out / total, 0.0)
    return out, jnp.where(reads, top + jnp.log(total), 0.0)[..., 0]


def _product(left: jax.Array, right: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    """A product batched over [B, K], float32."""
    num_rows = left.shape[2]
    if left.dtype == jnp.bfloat16 and target_platform() == "cpu" and num_rows < _MIN_BF16_ROWS:
        left = jnp.pad(left, ((0, 0), (0, 0), (0, _MIN_BF16_ROWS - num_rows), (0, 0)))
    dims = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    out = lax.dot_general(left, right, dims, precision=precision, preferred_element_type=jnp.float32)
    return out[:, :, :num_rows]


def _stack_heads(query: jax.Array, num_kv_heads: int) -> jax.Array:
    """Returns [B, K, G * T, H] of query [B, T, N, H]."""
    batch, q_len, num_q_heads, head_dim = query.shape
    grouped = query.reshape(batch, q_len, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, -1, head_dim)


def _unstack_heads(stacked: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns [B, T, N, X] of stacked [B, K, G * T, X]; `shape` is the query's."""
    batch, q_len, num_q_heads, _ = shape
    num_kv_heads, size = stacked.shape[1], stacked.shape[3]
    grouped = stacked.reshape(batch, num_kv_heads, num_q_heads // num_kv_heads, q_len, size)
    return grouped.transpose(0, 3, 1, 2, 4).reshape(batch, q_len, num_q_heads, size)
