"""The meaning of span attention: small, dense, plain jnp. Every other form is tested against it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def span_attention_reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    span_lo: jax.Array,
    span_hi: jax.Array,
    *,
    softmax_scale: float,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention of each query over its span of rows: [B, T, N, H], `query`'s dtype.

    Query head n reads key/value head n // (N // K). Query t of batch row b reads the rows s with
    span_lo[b, t] <= s <= span_hi[b, t]; a span with no such row gives zeros. With
    x_s = softmax_scale * <q, k_s>, soft-capped to cap * tanh(x_s / cap), the output is

        sum_s exp(x_s) v_s / (sum_s exp(x_s) + exp(sink_n))

    with the sink's term only where `sinks` is given. Everything is computed in float32. Rows that no
    span of their batch row contains are never read into a result, whatever they hold (NaN included).

    Args:
      query: [B, T, N, H].
      key, value: [B, K, S, H].
      span_lo, span_hi: int32 [B, T], inclusive row numbers.
      softmax_scale: factor on the scores.
      logits_soft_cap: cap on the scores' magnitude, None for none.
      sinks: [N] extra logit a head in the softmax denominator, None for none.
    """
    batch, q_len, num_q_heads, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    groups = num_q_heads // num_kv_heads
    rows = jnp.arange(kv_len)
    mask = (span_lo[..., None] <= rows) & (rows <= span_hi[..., None])  # [B, T, S]
    # Zeros in place of what no span contains: 0 * NaN would leak it, forwards and backwards.
    read = jnp.any(mask, axis=1)[:, None, :, None]
    key = jnp.where(read, key, 0).astype(jnp.float32)
    value = jnp.where(read, value, 0).astype(jnp.float32)
    reads = jnp.any(mask, axis=2)[:, :, None, None]
    grouped = jnp.where(reads, query, 0).astype(jnp.float32)
    grouped = grouped.reshape(batch, q_len, num_kv_heads, groups, head_dim)

    scores = softmax_scale * jnp.einsum("btkgh,bksh->bkgts", grouped, key)
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    mask = mask[:, None, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(num_kv_heads, groups)[None, :, :, None, None]
        top = jnp.maximum(top, sink)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(mask, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    weights = weights / jnp.where(total == 0, 1, total)
    out = jnp.einsum("bkgts,bksh->btkgh", weights, value)
    return out.reshape(query.shape).astype(query.dtype)
