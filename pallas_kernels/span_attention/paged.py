"""Span attention over a paged cache: reference and XLA form. Pages are [P, K, page_rows, H].

Row s of sequence b is row s % page_rows of page block_tables[b, s // page_rows].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.span_attention.reference import span_attention_reference
from pallas_kernels.span_attention.xla import span_attention_xla


def paged_span_attention_reference(
    query, key_pages, value_pages, block_tables, sequence_ids, span_lo, span_hi, *, sinks=None, **options
) -> jax.Array:
    """Returns [C, N, H]: every column over its own copy of its sequence's rows, dense."""
    tables = block_tables[jnp.maximum(sequence_ids, 0)]
    keys, values = gather_rows(key_pages, tables), gather_rows(value_pages, tables)
    hi = jnp.where(sequence_ids < 0, -1, span_hi)
    out = span_attention_reference(
        query[:, None], keys, values, span_lo[:, None], hi[:, None], sinks=sinks, **options
    )
    return out[:, 0]


def paged_span_attention_xla(
    query, key_pages, value_pages, block_tables, sequence_ids, span_lo, span_hi, *, sinks=None, **options
) -> jax.Array:
    """Returns [C, N, H]: one sequence after another, whose rows are gathered once; differentiable."""

    def add_sequence(out, sequence):
        mine = sequence_ids == sequence
        tables = block_tables[sequence][None]
        found = span_attention_xla(
            query[None],
            gather_rows(key_pages, tables),
            gather_rows(value_pages, tables),
            span_lo[None],
            jnp.where(mine, span_hi, -1)[None],
            sinks=sinks,
            **options,
        )
        return jnp.where(mine[:, None, None], found[0], out), None

    sequences = jnp.arange(block_tables.shape[0])
    return lax.scan(add_sequence, jnp.zeros_like(query), sequences)[0]


def gather_rows(pages: jax.Array, tables: jax.Array) -> jax.Array:
    """Returns the rows [n, K, S, H] that tables int32 [n, pages] name, S = pages * page_rows."""
    _, num_kv_heads, page_rows, head_dim = pages.shape
    rows = jnp.take(pages, tables, axis=0, mode="clip").transpose(0, 2, 1, 3, 4)
    return rows.reshape(tables.shape[0], num_kv_heads, tables.shape[1] * page_rows, head_dim)
