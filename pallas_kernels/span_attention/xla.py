"""Span attention in plain XLA, for CPUs and GPUs without a Pallas kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def span_attention_xla(
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
    """Same as `span_attention_reference`, matmul inputs in the input dtype."""
    batch, q_len, num_q_heads, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    groups = num_q_heads // num_kv_heads
    rows = jnp.arange(kv_len)
    mask = (span_lo[..., None] <= rows) & (rows <= span_hi[..., None])
    read = jnp.any(mask, axis=1)[:, None, :, None]
    key = jnp.where(read, key, 0)
    value = jnp.where(read, value, 0)
    grouped = query.reshape(batch, q_len, num_kv_heads, groups, head_dim)
    scores = softmax_scale * jnp.einsum(
        "btkgh,bksh->bkgts", grouped, key, preferred_element_type=jnp.float32
    )
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
    out = jnp.einsum(
        "bkgts,bksh->bkgth", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    out = out / jnp.where(total == 0, 1, total)
    return out.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)
