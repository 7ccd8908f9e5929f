"""Span attention in C++ (`native.cc`) for CPUs: optional, compiled by `python -m pallas_kernels.native`.

The tiles and their online softmax are those of the XLA form, but all that lies between the two products stays
in the caches, and bfloat16 products use AMX where the CPU has it. The backward pass is the XLA form's.
"""

from __future__ import annotations

import functools

import jax
import numpy as np

from pallas_kernels import native
from pallas_kernels.span_attention.xla import span_attention_xla


def unsupported(logits_soft_cap: float | None, sinks: jax.Array | None) -> str | None:
    """Returns why the kernel cannot take a call, None where it can."""
    if logits_soft_cap is not None:
        return "it has no logits_soft_cap"
    if sinks is not None:
        return "it has no sinks"
    return None


def span_attention_native(
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
    """Returns what `span_attention_reference` means, [B, T, N, H]; differentiable in reverse mode.

    Under `vmap` the calls run one after another. `logits_soft_cap` and `sinks` must be None.
    """
    assert unsupported(logits_soft_cap, sinks) is None  # held by the dispatcher
    return _attend(softmax_scale, query, key, value, span_lo, span_hi)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(softmax_scale, query, key, value, lo, hi):
    call = jax.ffi.ffi_call(
        native.target(f"span_attention_{query.dtype.name}"),
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        vmap_method="sequential",
    )
    return call(query, key, value, lo, hi, softmax_scale=np.float32(softmax_scale))


def _attend_fwd(softmax_scale, query, key, value, lo, hi):
    def attend(query, key, value):
        return span_attention_xla(query, key, value, lo, hi, softmax_scale=softmax_scale)

    return jax.vjp(attend, query, key, value)


def _attend_bwd(softmax_scale, vjp, d_out):
    return *vjp(d_out), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)
