"""Paged span attention for TPU: columns of several sequences in one tile, pages fetched by their tables."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.compat import pallas_tpu_refusal
from pallas_kernels.span_attention.blocks import canonical_spans
from pallas_kernels.span_attention.paged import paged_span_attention_xla
from pallas_kernels.span_attention.tpu import (
    LANES,
    MAX_HEAD_DIM,
    pack_rows,
    sink_rows,
    tile_rows,
    unpack_rows,
)
from pallas_kernels.span_attention.tpu_schedule import make_schedule, max_steps, too_large

# Rows fetched a step: pages are joined up to here. Each page is an operand of its own.
_BLOCK_KV = 1024
_MAX_PARTS = 16
_TILE_ROWS = 128


def unsupported(query: jax.Array, key_pages: jax.Array, block_tables: jax.Array) -> str | None:
    """Returns why the kernel cannot take the call, None where it can; shapes are the reference's."""
    if refusal := pallas_tpu_refusal():
        return refusal
    if query.shape[2] > MAX_HEAD_DIM:
        return f"it takes a head_dim of at most {MAX_HEAD_DIM}; got {query.shape[2]}"
    page_rows = key_pages.shape[2]
    if page_rows % LANES:
        return f"it takes pages of a multiple of {LANES} rows; got {page_rows}"
    columns, sequences = query.shape[0], block_tables.shape[0]
    groups = query.shape[1] // key_pages.shape[1]
    tiles = -(-columns // max(_TILE_ROWS // groups, 1))
    blocks = -(-block_tables.shape[1] // _parts(page_rows, block_tables.shape[1]))
    return too_large(tiles, sequences, max_steps(tiles, sequences, blocks, columns))


def paged_span_attention_tpu(
    query, key_pages, value_pages, block_tables, sequence_ids, span_lo, span_hi, *, interpret=False, **options
) -> jax.Array:
    """Returns what `paged_span_attention_reference` means, [C, N, H]; gradients go through the XLA form."""
    sinks = options.pop("sinks", None)
    static = (interpret, tuple(sorted(options.items())))
    return _attend(static, query, key_pages, value_pages, block_tables, sequence_ids, span_lo, span_hi, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, *arrays):
    return _forward(static, *arrays)


def _attend_fwd(static, *arrays):
    return _forward(static, *arrays), arrays


def _attend_bwd(static, arrays, d_out):
    query, keys, values, *numbers, sinks = arrays

    def xla(query, keys, values, sinks):
        return paged_span_attention_xla(query, keys, values, *numbers, sinks=sinks, **dict(static[1]))

    d_query, d_keys, d_values, d_sinks = jax.vjp(xla, query, keys, values, sinks)[1](d_out)
    return d_query, d_keys, d_values, None, None, None, None, d_sinks


_attend.defvjp(_attend_fwd, _attend_bwd)


def _parts(page_rows: int, pages: int) -> int:
    return max(min(_BLOCK_KV // page_rows, _MAX_PARTS, pages), 1)


def _forward(static, query, key_pages, value_pages, block_tables, sequence_ids, span_lo, span_hi, sinks):
    from pallas_kernels.span_attention.tpu_kernel import Operands, Program, attend_tiles

    interpret, options = static[0], dict(static[1])
    num_kv_heads, page_rows = key_pages.shape[1:3]
    groups, kv_len = query.shape[1] // num_kv_heads, block_tables.shape[1] * page_rows
    block_kv = page_rows * _parts(page_rows, block_tables.shape[1])
    # A tile is whole columns: its rows are a multiple of 16 and of the heads that share a key head.
    columns = min(query.shape[0], max(_TILE_ROWS // groups, 1))
    while columns * groups % 16:
        columns += 1
    block_q = columns * groups
    rows = pack_rows(query[None], num_kv_heads, block_q)
    lo, hi = canonical_spans(span_lo, jnp.where(sequence_ids < 0, -1, span_hi), kv_len)
    lo, hi, ids = (
        tile_rows(jnp.repeat(x, groups)[None], block_q, fill=fill)
        for x, fill in ((lo, kv_len), (hi, -1), (sequence_ids, -1))
    )
    mine = ids[:, None] == jnp.arange(block_tables.shape[0])[:, None]
    blocks = -(-kv_len // block_kv)
    schedule = make_schedule(
        jnp.where(mine, lo[:, None], kv_len),
        jnp.where(mine, hi[:, None], -1),
        kv_len=kv_len,
        block_kv=block_kv,
        limit=max_steps(lo.shape[0], block_tables.shape[0], blocks, query.shape[0]),
        tiles_per_row=None,
    )
    program = Program(
        softmax_scale=options["softmax_scale"],
        logits_soft_cap=options.get("logits_soft_cap"),
        block_q=block_q,
        block_kv=block_kv,
        groups=1,
        page_rows=page_rows,
        interpret=interpret,
    )
    if sinks is not None:
        sinks = sink_rows(sinks, block_q, groups)
    operands = Operands(rows, key_pages, value_pages, lo, hi, ids, block_tables, sinks)
    return unpack_rows(attend_tiles(program, operands, schedule), (1, *query.shape))[0]
