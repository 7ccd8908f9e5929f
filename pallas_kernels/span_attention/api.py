"""Span attention: validate the call, then dispatch it to one implementation."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.compat import hopper_refusal, pallas_tpu_refusal, target_platform
from pallas_kernels.span_attention.native import span_attention_native, unsupported
from pallas_kernels.span_attention.reference import span_attention_reference
from pallas_kernels.span_attention.xla import span_attention_xla

Implementation = Literal["reference", "xla", "native", "pallas_tpu", "pallas_gpu"]


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
    """Returns the attention of each query over its span of key rows: [B, T, N, H], `query`'s dtype.

    Query t of batch row b reads rows span_lo[b, t] .. span_hi[b, t], both included and cut to 0..S-1;
    query head n reads key/value head n // (N // K). With x_s = softmax_scale * <q, k_s>, and
    x_s = cap * tanh(x_s / cap) where `logits_soft_cap` is given,

        out = sum_s exp(x_s) v_s / (sum_s exp(x_s) + exp(sinks[n]))

    in float32, the sink's term only where `sinks` is given. A span without rows gives zeros. Key and
    value rows that lie in no span of their batch row are not read into a result, whatever they hold
    (NaN included). Four queries with spans (0,0) (0,1) (1,2) (3,2) over S = 4 read

        s  0 1 2 3
        t0 x . . .
        t1 x x . .
        t2 . x x .
        t3 . . . .   zeros

    Differentiable in reverse mode with respect to query, key, value and sinks, whatever the
    implementation. Products take their inputs in the inputs' dtype; what a float32 product means on an
    accelerator is jax's `default_matmul_precision`.

    Args:
      query: float32 or bfloat16 [B, T, N, H].
      key: [B, K, S, H], `query`'s dtype; K divides N.
      value: as `key`.
      span_lo: int32 [B, T], the first row read.
      span_hi: int32 [B, T], the last row read.
      softmax_scale: factor on the scores, positive.
      logits_soft_cap: bound on the scores' magnitude, positive; None for none.
      sinks: [N] extra logit a head in the softmax denominator (gpt-oss); None for none.
      implementation: which form computes; None takes the best that the device and the shapes allow, a
        named one never falls back.

    Raises:
      ValueError: an argument is not as stated.
      NotImplementedError: the named implementation cannot take this call, or not on this device.
    """
    _check_arrays(query, key, value, span_lo, span_hi, sinks)
    _check_positive("softmax_scale", softmax_scale)
    if logits_soft_cap is not None:
        _check_positive("logits_soft_cap", logits_soft_cap)
    if implementation is None:
        implementation = _best(query, key, logits_soft_cap, sinks)
    elif implementation not in get_args(Implementation):
        raise ValueError(
            f"span_attention(implementation=...) must be one of {get_args(Implementation)} or None; "
            f"got {implementation!r}"
        )
    elif refusal := _refusal(implementation, query, key, logits_soft_cap, sinks):
        raise NotImplementedError(
            f"span_attention(implementation={implementation!r}) cannot run: {refusal}. "
            "Pass implementation=None for the best form that can"
        )
    if 0 in query.shape or 0 in key.shape:  # nothing to read, or no one to read it
        return jnp.zeros_like(query)
    return _function(implementation)(
        query,
        key,
        value,
        span_lo,
        span_hi,
        softmax_scale=float(softmax_scale),
        logits_soft_cap=None if logits_soft_cap is None else float(logits_soft_cap),
        sinks=sinks,
    )


def available_implementations() -> dict[Implementation, str | None]:
    """Returns, for each implementation, why it does not run on the target device; None where it does."""
    return {name: _device_refusal(name) for name in get_args(Implementation)}


def _function(implementation: Implementation) -> Callable:
    if implementation == "pallas_tpu":
        from pallas_kernels.span_attention import tpu  # late: importing Pallas adds a third to the start

        return tpu.span_attention_tpu
    if implementation == "pallas_gpu":
        from pallas_kernels.span_attention import gpu

        return gpu.span_attention_gpu
    if implementation == "native":
        return span_attention_native
    return span_attention_reference if implementation == "reference" else span_attention_xla


def _device_refusal(implementation: Implementation) -> str | None:
    platform = target_platform()
    if implementation == "pallas_gpu":
        return hopper_refusal()
    if implementation == "pallas_tpu" and platform != "tpu":
        return f"it is compiled by Mosaic for TPU; the target device is a {platform}"
    if implementation == "pallas_tpu":
        return pallas_tpu_refusal()
    if implementation == "native":
        return native.unavailable()
    return None


def _best(
    query: jax.Array, key: jax.Array, logits_soft_cap: float | None, sinks: jax.Array | None
) -> Implementation:
    kernels: tuple[Implementation, ...] = ("pallas_tpu", "pallas_gpu", "native")
    for name in kernels:
        if not _refusal(name, query, key, logits_soft_cap, sinks):
            return name
    return "xla"


def _refusal(
    implementation: Implementation,
    query: jax.Array,
    key: jax.Array,
    logits_soft_cap: float | None,
    sinks: jax.Array | None,
) -> str | None:
    if refusal := _device_refusal(implementation):
        return refusal
    if implementation == "native":
        return unsupported(logits_soft_cap, sinks)
    if implementation == "pallas_tpu":
        from pallas_kernels.span_attention import tpu

        return tpu.unsupported(query, key)
    if implementation == "pallas_gpu":
        from pallas_kernels.span_attention import gpu

        return gpu.unsupported(query)
    return None


def _check_arrays(query, key, value, span_lo, span_hi, sinks) -> None:
    if query.ndim != 4 or query.dtype not in (jnp.float32, jnp.bfloat16):
        raise _mismatch("query", "float32 or bfloat16 [B, T, N, H]", query)
    batch, q_len, num_q_heads, head_dim = query.shape
    like_query = f"{query.dtype} [B={batch}, K, S, H={head_dim}], as query {_shape(query)}"
    for name, x in (("key", key), ("value", value)):
        if x.ndim != 4 or x.dtype != query.dtype or (x.shape[0], x.shape[3]) != (batch, head_dim):
            raise _mismatch(name, like_query, x)
    if value.shape != key.shape:
        raise _mismatch("value", f"of the shape of key, {_shape(key)}", value)
    num_kv_heads = key.shape[1]
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"span_attention(key=...) must have a number of heads K that divides query's N={num_q_heads}; "
            f"got K={num_kv_heads}"
        )
    for name, x in (("span_lo", span_lo), ("span_hi", span_hi)):
        if x.shape != (batch, q_len) or x.dtype != jnp.int32:
            raise _mismatch(name, f"int32 [B={batch}, T={q_len}]", x)
    if sinks is not None and (sinks.shape != (num_q_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise _mismatch("sinks", f"floating [N={num_q_heads}] or None", sinks)


def _check_positive(name: str, value: float) -> None:
    if not isinstance(value, numbers.Real) or not 0 < value < math.inf:
        raise ValueError(
            f"span_attention({name}=...) must be a positive finite number known at trace time; got {value!r}"
        )


def _mismatch(name: str, expected: str, got) -> ValueError:
    return ValueError(f"span_attention({name}=...) must be {expected}; got {got.dtype} {_shape(got)}")


def _shape(x) -> str:
    return str(tuple(x.shape))
