"""Span attention: validate the call, then dispatch it to one implementation."""

from __future__ import annotations

from typing import Literal, get_args

import jax

from pallas_kernels.span_attention.reference import span_attention_reference
from pallas_kernels.span_attention.xla import span_attention_xla

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]


def span_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    span_lo: jax.Array,
    span_hi: jax.Array,
    *,
    softmax_scale: float,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns the attention of each query over its span of key rows: [B, T, N, H], `query`'s dtype."""
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "sinks": sinks}
    if implementation is None or implementation == "xla":
        return span_attention_xla(query, key, value, span_lo, span_hi, **options)
    if implementation == "reference":
        return span_attention_reference(query, key, value, span_lo, span_hi, **options)
    raise ValueError(
        f"span_attention(implementation=...) must be one of {get_args(Implementation)} or None; "
        f"got {implementation!r}"
    )
