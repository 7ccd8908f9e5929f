"""Span attention for TPU (Pallas on Mosaic): an online softmax over the kv blocks that a tile's spans touch.

Grid: batch row, query head, query tile, kv step. Two scalars a tile, prefetched, say which kv blocks
its spans touch; step j of tile i reads block first[i] + j, and the number of steps is the greatest
that any tile needs. A step past a tile's last block computes nothing and fetches the first block of
the next tile. Blocks that lie in every span of the tile take a path without masking.

Per-query values (running maximum and sum, span bounds) are held 128 lanes wide, [block_q, 128]:
columns of width one would cost a cross-lane move at every use.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.span_attention.blocks import canonical_spans, spans_have_gap, tile_extents
from pallas_kernels.span_attention.xla import SCORE_FLOOR, span_attention_xla

LANES = 128
MAX_HEAD_DIM = 256
# Fewer queries leave most of the matrix unit idle: the XLA form serves decode.
MIN_Q_LEN = 8


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Queries and key rows a grid step; block_kv is a multiple of 128."""

    block_q: int = 256
    block_kv: int = 512


def unsupported(query: jax.Array) -> str | None:
    """Returns why this kernel cannot take query [B, T, N, H], None where it can."""
    if query.shape[3] > MAX_HEAD_DIM:
        return f"it takes a head_dim of at most {MAX_HEAD_DIM}; got {query.shape[3]}"
    if query.shape[1] < MIN_Q_LEN:
        return f"it takes at least {MIN_Q_LEN} queries a row; got {query.shape[1]}"
    return None


@dataclasses.dataclass(frozen=True)
class _Static:
    softmax_scale: float
    logits_soft_cap: float | None
    blocks: BlockSizes
    interpret: bool


def span_attention_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    span_lo: jax.Array,
    span_hi: jax.Array,
    *,
    softmax_scale: float,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    blocks: BlockSizes | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns what `span_attention_reference` means, [B, T, N, H]; gradients go through the XLA form.

    Arguments are the reference's. `blocks` overrides the block sizes; `interpret` runs the kernel
    anywhere (also a `pltpu.InterpretParams`).
    """
    static = _Static(softmax_scale, logits_soft_cap, blocks or BlockSizes(), interpret)
    return _attend(static, query, key, value, span_lo, span_hi, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, span_lo, span_hi, sinks):
    return _forward(static, query, key, value, span_lo, span_hi, sinks)


def _attend_fwd(static, *arrays):
    return _forward(static, *arrays), arrays


def _attend_bwd(static, arrays, d_out):
    query, key, value, span_lo, span_hi, sinks = arrays

    def xla(query, key, value, sinks):
        return span_attention_xla(
            query,
            key,
            value,
            span_lo,
            span_hi,
            softmax_scale=static.softmax_scale,
            logits_soft_cap=static.logits_soft_cap,
            sinks=sinks,
        )

    d_query, d_key, d_value, d_sinks = jax.vjp(xla, query, key, value, sinks)[1](d_out)
    return d_query, d_key, d_value, None, None, d_sinks


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(static, query, key, value, span_lo, span_hi, sinks):
    batch, q_len, num_q_heads, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    groups = num_q_heads // num_kv_heads
    block_q = min(static.blocks.block_q, _round_up(q_len, LANES))
    block_kv = min(static.blocks.block_kv, _round_up(kv_len, LANES))
    num_tiles = pl.cdiv(q_len, block_q)

    lo, hi = canonical_spans(span_lo, span_hi, kv_len)
    pad = ((0, 0), (0, num_tiles * block_q - q_len))
    lo = jnp.pad(lo, pad, constant_values=kv_len).reshape(batch * num_tiles, block_q)
    hi = jnp.pad(hi, pad, constant_values=-1).reshape(batch * num_tiles, block_q)
    extents = tile_extents(lo, hi, kv_len=kv_len, block_kv=block_kv)
    steps = jnp.maximum(jnp.max(extents.end_block - extents.first_block), 1)
    hull = jnp.stack([jnp.min(lo, axis=-1), jnp.max(hi, axis=-1)])
    tiles = jnp.concatenate([jnp.stack(extents), hull, spans_have_gap(lo, hi).astype(jnp.int32)[None]])
    if sinks is None:
        sinks = jnp.full((num_q_heads,), SCORE_FLOOR)

    def tile_index(b, n, i, j, tiles, sinks):
        return b, n, i, 0

    def span_index(b, n, i, j, tiles, sinks):
        return b * num_tiles + i, 0, 0

    def kv_index(b, n, i, j, tiles, sinks):
        tile = b * num_tiles + i
        follower = b * num_tiles + jnp.minimum(i + 1, num_tiles - 1)
        block = tiles[_FIRST, tile] + j
        block = jnp.where(block < tiles[_END, tile], block, tiles[_FIRST, follower])
        return b, n // groups, jnp.minimum(block, pl.cdiv(kv_len, block_kv) - 1), 0

    tile_spec = pl.BlockSpec((None, None, block_q, head_dim), tile_index)
    span_spec = pl.BlockSpec((None, 1, block_q), span_index)
    kv_spec = pl.BlockSpec((None, None, block_kv, head_dim), kv_index)
    out = pl.pallas_call(
        functools.partial(_kernel, static, num_tiles=num_tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, num_q_heads, num_tiles, steps),
            in_specs=[tile_spec, kv_spec, kv_spec, span_spec, span_spec],
            out_specs=tile_spec,
            scratch_shapes=[
                pltpu.VMEM((block_q, LANES), jnp.int32),
                pltpu.VMEM((block_q, LANES), jnp.int32),
                pltpu.VMEM((block_q, LANES), jnp.float32),
                pltpu.VMEM((block_q, LANES), jnp.float32),
                pltpu.VMEM((block_q, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, num_q_heads, q_len, head_dim), query.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
        ),
        interpret=static.interpret,
        name="span_attention",
    )(
        tiles,
        sinks.astype(jnp.float32),
        query.transpose(0, 2, 1, 3),
        key,
        value,
        lo[:, None],
        (hi - lo + 1)[:, None],
    )
    return out.transpose(0, 2, 1, 3)


# Rows of the prefetched table, one column a tile.
_FIRST, _END, _SHARED_LO, _SHARED_HI, _HULL_LO, _HULL_HI, _GAP = range(7)


def _kernel(
    static,
    tiles,
    sinks,
    query,
    key,
    value,
    span_lo,
    span_width,
    out,
    lo,
    width,
    top,
    total,
    weighted,
    *,
    num_tiles,
):
    """One kv step of one tile; `lo` .. `weighted` are scratch that lives through a tile's steps."""
    head, tile, step = pl.program_id(1), pl.program_id(0) * num_tiles + pl.program_id(2), pl.program_id(3)
    block_kv = key.shape[0]
    block = tiles[_FIRST, tile] + step
    first_row = block * block_kv

    @pl.when(step == 0)
    def start():
        lo[...] = _lane_wide(span_lo)
        width[...] = _lane_wide(span_width)
        top[...] = jnp.full_like(top, SCORE_FLOOR)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    def visit(mask, visible):
        keys, values = key[...], value[...]
        scores = _scores(static, query[...], keys)
        if mask is not None:
            scores = jnp.where(mask, scores, SCORE_FLOOR)
            values = jnp.where(visible, values, 0)
        old = top[...]
        new = jnp.maximum(old, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - _repeat_lanes(new, block_kv))
        rescale = jnp.exp(old - new)
        top[...] = new
        total[...] = total[...] * rescale + _sum_lane_groups(weights)
        weighted[...] = weighted[...] * _repeat_lanes(rescale, weighted.shape[1]) + _product(
            weights.astype(values.dtype), values, contract=(1, 0)
        )

    touched = block < tiles[_END, tile]
    whole = (tiles[_SHARED_LO, tile] <= first_row) & (first_row + block_kv - 1 <= tiles[_SHARED_HI, tile])
    gap = tiles[_GAP, tile] != 0

    @pl.when(touched & whole)
    def unmasked():
        visit(None, None)

    def masked(visible):
        rows = first_row + lax.broadcasted_iota(jnp.int32, (query.shape[0], block_kv), 1)
        # One unsigned compare: below lo wraps to a huge number. An empty span has width <= 0, as int32.
        offset = (rows - _repeat_lanes(lo[...], block_kv)).astype(jnp.uint32)
        mask = offset < jnp.maximum(_repeat_lanes(width[...], block_kv), 0).astype(jnp.uint32)
        visit(mask, visible(mask))

    # Value rows that no span holds may be NaN, and 0 * NaN is NaN.
    @pl.when(touched & ~whole & ~gap)
    def masked_without_gap():
        rows = first_row + lax.broadcasted_iota(jnp.int32, value.shape, 0)
        masked(lambda mask: (tiles[_HULL_LO, tile] <= rows) & (rows <= tiles[_HULL_HI, tile]))

    @pl.when(touched & ~whole & gap)
    def masked_with_gap():
        ones = jnp.ones((query.shape[0], value.shape[1]), jnp.bfloat16)
        masked(lambda mask: _product(mask.astype(jnp.bfloat16), ones, contract=(0, 0)) > 0)

    @pl.when(step == pl.num_programs(3) - 1)
    def finish():
        denominator = jnp.sum(total[...], axis=-1, keepdims=True)
        sink = sinks[head]
        shifted = jnp.maximum(top[...], sink)
        rescale = jnp.exp(top[...] - shifted)
        denominator = denominator * rescale + jnp.exp(sink - shifted)
        reads = width[...] > 0
        factor = jnp.where(reads, rescale / jnp.where(reads, denominator, 1), 0)
        factor, reads = (_repeat_lanes(x, weighted.shape[1]) for x in (factor, reads.astype(jnp.int32)))
        out[...] = jnp.where(reads > 0, weighted[...] * factor, 0).astype(out.dtype)


def _scores(static, queries, keys):
    scores = _product(queries, keys, contract=(1, 1)) * static.softmax_scale
    if static.logits_soft_cap is None:
        return scores
    return static.logits_soft_cap * jnp.tanh(scores / static.logits_soft_cap)


def _product(left, right, *, contract):
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _lane_wide(row):
    """A packed ref [1, block_q] as [block_q, 128], every lane the same."""
    return jnp.broadcast_to(row[...], (LANES, row.shape[1])).T


def _repeat_lanes(x, lanes):
    """[block_q, 128] to [block_q, lanes] for x whose lanes are all the same."""
    if lanes <= LANES:
        return x[:, :lanes]
    whole = jnp.concatenate([x] * pl.cdiv(lanes, LANES), axis=1)
    return whole if lanes % LANES == 0 else whole[:, :lanes]


def _sum_lane_groups(x):
    """[block_q, block_kv] to [block_q, 128]: sums of every 128th column; adds whole registers only."""
    return functools.reduce(jnp.add, [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)])


def _round_up(size, multiple):
    return pl.cdiv(size, multiple) * multiple
