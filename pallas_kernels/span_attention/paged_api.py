"""Paged span attention: validate the call, then dispatch it to one implementation."""

from __future__ import annotations

import math
import numbers
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.compat import target_platform
from pallas_kernels.span_attention.paged import paged_span_attention_reference, paged_span_attention_xla

PagedImplementation = Literal["reference", "xla", "pallas_tpu"]


def paged_span_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    block_tables: jax.Array,
    sequence_ids: jax.Array,
    span_lo: jax.Array,
    span_hi: jax.Array,
    *,
    softmax_scale: float,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: PagedImplementation | None = None,
) -> jax.Array:
    """Returns the attention of each column over its span of its sequence's rows: [C, N, H], `query`'s dtype.

    Row s of sequence b is row s % R of page block_tables[b, s // R]; else the rule is `span_attention`'s.
    A span without rows and a column of no sequence give zeros. Columns stand in any order.

    Args:
      query: float32 or bfloat16 [C, N, H].
      key_pages: [P, K, R, H], `query`'s dtype; K divides N.
      value_pages: as `key_pages`.
      block_tables: int32 [sequences, pages]; entries that a span reaches name pages 0..P-1, others anything.
      sequence_ids: int32 [C], the sequence that a column reads, -1 for none.
      span_lo, span_hi: int32 [C], the first and last row read, in rows of the sequence.
      softmax_scale, logits_soft_cap, sinks: as of `span_attention`.
      implementation: which form computes; None takes the best that the device and the shapes allow.

    Raises:
      ValueError: an argument is not as stated.
      NotImplementedError: the named implementation cannot take this call, or not on this device.
    """
    _check_arrays(query, key_pages, value_pages, block_tables, sequence_ids, span_lo, span_hi, sinks)
    for name, number in (("softmax_scale", softmax_scale), ("logits_soft_cap", logits_soft_cap)):
        optional = name == "logits_soft_cap" and number is None
        if not optional and not (isinstance(number, numbers.Real) and 0 < number < math.inf):
            raise ValueError(
                f"paged_span_attention({name}=...) must be a positive finite number known at trace time; "
                f"got {number!r}"
            )
    function = _choose(implementation, query, key_pages, block_tables)
    if 0 in (*query.shape, *key_pages.shape, *block_tables.shape):
        return jnp.zeros_like(query)
    options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "sinks": sinks}
    arrays = (query, key_pages, value_pages, block_tables, sequence_ids, span_lo, span_hi)
    return function(*arrays, **options)


def _choose(implementation, query, key_pages, block_tables):
    if implementation not in (None, *get_args(PagedImplementation)):
        raise ValueError(
            f"paged_span_attention(implementation=...) must be one of {get_args(PagedImplementation)} "
            f"or None; got {implementation!r}"
        )
    if implementation == "reference":
        return paged_span_attention_reference
    if implementation == "xla" or (implementation is None and target_platform() != "tpu"):
        return paged_span_attention_xla
    from pallas_kernels.span_attention import tpu_paged  # late: importing Pallas adds a third to the start

    refusal = tpu_paged.unsupported(query, key_pages, block_tables)
    if target_platform() != "tpu":
        refusal = f"it is compiled by Mosaic for TPU; the target device is a {target_platform()}"
    if refusal is None:
        return tpu_paged.paged_span_attention_tpu
    if implementation is None:
        return paged_span_attention_xla
    raise NotImplementedError(
        f"paged_span_attention(implementation={implementation!r}) cannot run: {refusal}. "
        "Pass implementation=None for the best form that can"
    )


def _check_arrays(query, key_pages, value_pages, block_tables, sequence_ids, span_lo, span_hi, sinks) -> None:
    if query.ndim != 3 or query.dtype not in (jnp.float32, jnp.bfloat16):
        raise _mismatch("query", "float32 or bfloat16 [C, N, H]", query)
    columns, num_q_heads, head_dim = query.shape
    for name, x in (("key_pages", key_pages), ("value_pages", value_pages)):
        if x.ndim != 4 or x.dtype != query.dtype or x.shape[3] != head_dim:
            raise _mismatch(name, f"{query.dtype} [P, K, R, H={head_dim}]", x)
    if value_pages.shape != key_pages.shape:
        raise _mismatch("value_pages", f"of the shape of key_pages, {key_pages.shape}", value_pages)
    if key_pages.shape[1] == 0 or num_q_heads % key_pages.shape[1]:
        raise _mismatch("key_pages", f"of a number of heads K that divides N={num_q_heads}", key_pages)
    if block_tables.ndim != 2 or block_tables.dtype != jnp.int32:
        raise _mismatch("block_tables", "int32 [sequences, pages]", block_tables)
    for name, x in (("sequence_ids", sequence_ids), ("span_lo", span_lo), ("span_hi", span_hi)):
        if x.shape != (columns,) or x.dtype != jnp.int32:
            raise _mismatch(name, f"int32 [C={columns}]", x)
    if sinks is not None and (sinks.shape != (num_q_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise _mismatch("sinks", f"floating [N={num_q_heads}] or None", sinks)


def _mismatch(name: str, expected: str, got) -> ValueError:
    return ValueError(
        f"paged_span_attention({name}=...) must be {expected}; got {got.dtype} {tuple(got.shape)}"
    )
