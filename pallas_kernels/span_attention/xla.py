"""Span attention in plain XLA, for CPUs and for GPUs without a Pallas kernel.

The work is cut into tiles: `block_q` queries of one batch row with all their heads, [K, G, block_q, H].
A tile walks the kv blocks between its lowest and highest key row with an online softmax in float32,
so that time follows the spans and no [T, S] array exists. The backward pass walks the same blocks and
recomputes the weights from the saved log of the softmax denominator. A few queries a row (decode) take
the form of `few_queries.py` in the forward pass.

Choices measured on CPU (2 cores, AMX) that shape the code:
- The cache is sliced as the [B, K, S, H] array it is. A reshape or squeeze of the whole cache fuses
  with the caller's in-place row update, and XLA then copies the cache every step.
- A kv block of about 64k elements stays in the L2 cache between its copy and its two products.
- Batch rows one after another: one product for all rows is no faster, and makes every row pay for
  the longest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import target_platform
from pallas_kernels.span_attention.blocks import canonical_spans, tile_extents
from pallas_kernels.span_attention.few_queries import attend_few_queries

# Below every real score, and finite: a row that has seen no key yet has exp(floor - floor) == 1 for
# garbage weights, which the first real score multiplies by exp(floor - score) == 0.
SCORE_FLOOR = -1e30

_FEW_ROWS = 16  # query rows a key/value head


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work is cut."""

    block_q: int
    block_kv: int
    dtype: jnp.dtype  # of the products' inputs
    sequential: bool  # batch rows one after another (CPU), or all at once (where launches cost more)

    @property
    def sorts_blocks(self) -> bool:
        """Whether a block picks its own path: skipped, unmasked or masked. Not worth it for few queries."""
        return self.sequential and self.block_q > 8


@dataclasses.dataclass(frozen=True)
class _Static:
    """What one trace is specialised on."""

    softmax_scale: float
    logits_soft_cap: float | None
    tiling: Tiling
    few_queries: bool  # the forward pass takes the form without a loop

    @property
    def score_unit(self) -> float:
        """What turns `_scores` into logits: the scale waits for the exponential, which saves a pass."""
        return self.softmax_scale if self.logits_soft_cap is None else 1.0


def default_tiling(query: jax.Array, key: jax.Array) -> Tiling:
    """Returns the tiling for query [B, T, N, H] and key [B, K, S, H] on the target platform."""
    q_len, num_q_heads, head_dim = query.shape[1:]
    num_kv_heads, kv_len = key.shape[1:3]
    if target_platform() != "cpu":
        return Tiling(min(q_len, 256), min(kv_len, 1024), query.dtype, sequential=False)
    block_q = -(-q_len // -(-q_len // 128))  # even tiles of at most 128 queries
    if block_q * num_q_heads // num_kv_heads < 16:
        resident = 65536 // (num_kv_heads * head_dim)
        block_kv = next(rows for rows in (512, 256, 128, 64) if rows <= max(resident, 64))
        return Tiling(block_q, min(kv_len, block_kv), jnp.dtype(jnp.float32), sequential=True)
    return Tiling(block_q, min(kv_len, 256), query.dtype, sequential=True)


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
    tiling: Tiling | None = None,
) -> jax.Array:
    """Returns what `span_attention_reference` means, [B, T, N, H]; differentiable in reverse mode.

    Arguments are the reference's; `tiling` overrides `default_tiling`.
    """
    groups = query.shape[2] // key.shape[1]
    few = tiling is None and query.shape[1] * groups <= _FEW_ROWS
    static = _Static(softmax_scale, logits_soft_cap, tiling or default_tiling(query, key), few)
    lo, hi = canonical_spans(span_lo, span_hi, key.shape[2])
    return _attend(static, query, key, value, lo, hi, sinks)


def pull_back(
    arrays: tuple[Any, ...],
    d_out: jax.Array,
    softmax_scale: float,
    logits_soft_cap: float | None,
) -> tuple[jax.Array | None, ...]:
    """Returns the gradients of query, key, value, spans (None) and sinks: the backward pass of kernels that
    have none of their own.

    Args:
      arrays: query, key, value, span_lo, span_hi and sinks (or None).
      d_out: gradient of the output, [B, T, N, H].
    """
    query, key, value, span_lo, span_hi, sinks = arrays

    def attend(query, key, value, sinks):
        options = {"softmax_scale": softmax_scale, "logits_soft_cap": logits_soft_cap, "sinks": sinks}
        return span_attention_xla(query, key, value, span_lo, span_hi, **options)

    d_query, d_key, d_value, d_sinks = jax.vjp(attend, query, key, value, sinks)[1](d_out)
    return d_query, d_key, d_value, None, None, d_sinks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, lo, hi, sinks):
    return _forward(static, query, key, value, lo, hi, sinks)[0]


def _attend_fwd(static, query, key, value, lo, hi, sinks):
    out, lse = _forward(static, query, key, value, lo, hi, sinks)
    return out, (query, key, value, lo, hi, sinks, out, lse)


def _attend_bwd(static, residuals, d_out):
    query, key, value, lo, hi, sinks, out, lse = residuals
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)  # [B, T, N]
    d_query, d_key, d_value = _backward(static, query, key, value, lo, hi, lse, delta, d_out)
    d_sinks = None
    if sinks is not None:
        weight = jnp.exp(sinks.astype(jnp.float32) - lse)
        d_sinks = -jnp.sum(jnp.where((lo <= hi)[..., None], weight * delta, 0), axis=(0, 1))
        d_sinks = d_sinks.astype(sinks.dtype)
    return d_query, d_key, d_value, None, None, d_sinks


_attend.defvjp(_attend_fwd, _attend_bwd)


# Forward


class _Softmax(NamedTuple):
    """An online softmax over the blocks seen so far, float32."""

    top: jax.Array  # [K, G, block_q] greatest score
    total: jax.Array  # [K, G, block_q] sum of exp(score - top)
    out: jax.Array  # [K, G, block_q, H] sum of exp(score - top) * value


def _forward(static, query, key, value, lo, hi, sinks):
    """Returns the output [B, T, N, H] and the log of the softmax denominator, float32 [B, T, N]."""
    if static.few_queries:
        out, lse = attend_few_queries(
            query,
            key,
            value,
            lo,
            hi,
            sinks,
            softmax_scale=static.softmax_scale,
            logits_soft_cap=static.logits_soft_cap,
        )
        return out.astype(query.dtype), lse
    q_len, num_kv_heads, block_q = query.shape[1], key.shape[1], static.tiling.block_q
    pad = functools.partial(_pad_queries, length=-q_len % block_q)
    read_query = _tile_reader(pad(query), block_q)
    read_lo = _tile_reader(pad(lo, fill=key.shape[2]), block_q)
    read_hi = _tile_reader(pad(hi, fill=-1), block_q)

    def tile(row, index):
        lo, hi = read_lo(row, index), read_hi(row, index)
        queries = _by_kv_head(read_query(row, index), num_kv_heads, reads=lo <= hi)
        softmax = _walk_blocks(static, queries, lo, hi, key, value, row)
        out, lse = _finish(static, softmax, sinks, reads=lo <= hi)
        return _by_query(out), _by_query(lse)

    outputs = _map_tiles(static.tiling, tile, query.shape[0], -(-q_len // block_q))
    out, lse = (x.reshape(x.shape[0], -1, *x.shape[3:])[:, :q_len] for x in outputs)
    return out.astype(query.dtype), lse


def _walk_blocks(static, queries, lo, hi, key, value, row) -> _Softmax:
    """Runs the online softmax of one tile over the kv blocks that its spans touch."""
    block_kv = static.tiling.block_kv
    extents = tile_extents(lo, hi, kv_len=key.shape[2], block_kv=block_kv)
    shape = queries.shape[:3]
    empty = _Softmax(
        jnp.full(shape, SCORE_FLOOR, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(queries.shape, jnp.float32),
    )

    def visit(block, softmax):
        keys, values, rows = _read_blocks(static, (key, value), row, block)

        def masked(softmax):
            mask = _mask(rows, block * block_kv, lo, hi)
            return _add_block(static, softmax, queries, keys, values, mask)

        def full(softmax):
            return _add_block(static, softmax, queries, keys, values, None)

        if not static.tiling.sorts_blocks:
            return masked(softmax)
        first, last = block * block_kv, (block + 1) * block_kv - 1
        whole = (extents.shared_lo <= first) & (last <= extents.shared_hi)
        touched = jnp.any((lo <= last) & (first <= hi))
        kind = jnp.where(whole, 2, touched.astype(jnp.int32))
        return lax.switch(kind, [lambda softmax: softmax, masked, full], softmax)

    return lax.fori_loop(extents.first_block, extents.end_block, visit, empty)


def _add_block(static, softmax: _Softmax, queries, keys, values, mask) -> _Softmax:
    """Adds the rows of one kv block, [K, block_kv, H]; mask [block_q, block_kv], None where all are read."""
    scores = _scores(static, queries, keys)
    if mask is not None:
        scores = jnp.where(mask, scores, SCORE_FLOOR)
        values = jnp.where(jnp.any(mask, axis=0)[:, None], values, 0)  # 0 * NaN is NaN
    top = jnp.maximum(softmax.top, jnp.max(scores, axis=-1))
    weights = _weights(static, (scores - top[..., None]) * static.score_unit)
    rescale = jnp.exp((softmax.top - top) * static.score_unit)
    return _Softmax(
        top,
        softmax.total * rescale + jnp.sum(weights, axis=-1, dtype=jnp.float32),
        softmax.out * rescale[..., None] + _product(static, "kgts,ksh->kgth", weights, values),
    )


def _finish(static, softmax: _Softmax, sinks, reads):
    """Returns the tile's output [K, G, block_q, H] and log denominator; zeros where nothing is read."""
    top, total, out = softmax.top * static.score_unit, softmax.total, softmax.out
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(top.shape[:2])[..., None]
        shifted = jnp.maximum(top, sink)
        rescale = jnp.exp(top - shifted)
        top, total, out = shifted, total * rescale + jnp.exp(sink - shifted), out * rescale[..., None]
    total = jnp.where(reads, total, 1)
    return jnp.where(reads[:, None], out / total[..., None], 0), jnp.where(reads, top + jnp.log(total), 0)


# Backward


def _backward(static, query, key, value, lo, hi, lse, delta, d_out):
    """Returns the gradients of query, key and value; `delta` [B, T, N] is sum(out * d_out)."""
    tiling = static.tiling
    q_len, num_q_heads, head_dim = query.shape[1:]
    num_kv_heads, kv_len = key.shape[1:3]
    num_tiles = -(-q_len // tiling.block_q)
    pad = functools.partial(_pad_queries, length=-q_len % tiling.block_q)
    read_lo = _tile_reader(pad(lo, fill=kv_len), tiling.block_q)
    read_hi = _tile_reader(pad(hi, fill=-1), tiling.block_q)
    readers = [_tile_reader(pad(x), tiling.block_q) for x in (query, d_out, lse, delta)]

    def row_gradients(row):
        def tile(gradients, index):
            lo, hi = read_lo(row, index), read_hi(row, index)
            tile_of = (_by_kv_head(read(row, index), num_kv_heads, reads=lo <= hi) for read in readers)
            queries, d_out, lse, delta = tile_of
            d_queries, *gradients = _walk_back(
                static, queries, d_out, lse, delta, lo, hi, key, value, row, gradients
            )
            return tuple(gradients), _by_query(d_queries)

        zeros = jnp.zeros((num_kv_heads, kv_len, head_dim), jnp.float32)
        (d_key, d_value), d_query = lax.scan(tile, (zeros, zeros), jnp.arange(num_tiles))
        return d_query.reshape(-1, num_q_heads, head_dim)[:q_len], d_key, d_value

    d_query, d_key, d_value = _map_rows(tiling, row_gradients, query.shape[0])
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)


def _walk_back(static, queries, d_out, lse, delta, lo, hi, key, value, row, gradients):
    """Adds one tile to the float32 gradients of a row's keys and values; returns its queries' as well."""
    block_kv = static.tiling.block_kv
    extents = tile_extents(lo, hi, kv_len=key.shape[2], block_kv=block_kv)

    def visit(block, carry):
        d_queries, d_key, d_value = carry
        keys, values, rows = _read_blocks(static, (key, value), row, block)
        mask = _mask(rows, block * block_kv, lo, hi)
        read = jnp.any(mask, axis=0)[:, None]
        keys, values = jnp.where(read, keys, 0), jnp.where(read, values, 0)  # 0 * NaN is NaN
        scores = _scores(static, queries, keys)
        weights = jnp.where(mask, jnp.exp(scores * static.score_unit - lse[..., None]), 0)
        d_weights = _product(static, "kgth,ksh->kgts", d_out, values)
        d_scores = weights * (d_weights - delta[..., None]) * static.softmax_scale
        if static.logits_soft_cap is not None:
            d_scores *= 1 - jnp.square(scores / static.logits_soft_cap)
        d_queries += _product(static, "kgts,ksh->kgth", d_scores, keys)
        d_key = _add_rows(d_key, _product(static, "kgts,kgth->ksh", d_scores, queries), rows[0])
        d_value = _add_rows(d_value, _product(static, "kgts,kgth->ksh", weights, d_out), rows[0])
        return d_queries, d_key, d_value

    start = (jnp.zeros(queries.shape, jnp.float32), *gradients)
    return lax.fori_loop(extents.first_block, extents.end_block, visit, start)


def _add_rows(total, rows, start):
    """Adds rows [K, block_kv, H] to total [K, S, H] in place, from row `start` on."""
    there = lax.dynamic_slice_in_dim(total, start, rows.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(total, there + rows, start, axis=1)


# Products and blocks


def _product(static, subscripts, left, right):
    """A product with inputs in the tiling's dtype and float32 accumulation and output."""
    dtype = static.tiling.dtype
    return jnp.einsum(subscripts, left.astype(dtype), right.astype(dtype), preferred_element_type=jnp.float32)


def _scores(static, queries, keys):
    """Returns the float32 scores [K, G, block_q, block_kv], logits over `score_unit`."""
    scores = _product(static, "kgth,ksh->kgts", queries, keys)
    if static.logits_soft_cap is None:
        return scores
    return static.logits_soft_cap * jnp.tanh(scores * (static.softmax_scale / static.logits_soft_cap))


def _weights(static, logits):
    """Returns exp(logits) in the tiling's dtype.

    A CPU has no fast rounding to bfloat16, so the low half of the float32 is dropped instead. The
    denominator sums these same weights, hence the cut does not bias the output: its error is that of
    rounding. The barrier keeps XLA from summing weights that are not cut.
    """
    weights = jnp.exp(logits)
    if not (static.tiling.sequential and static.tiling.dtype == jnp.bfloat16):
        return weights.astype(static.tiling.dtype)
    high = (lax.bitcast_convert_type(weights, jnp.uint32) >> 16).astype(jnp.uint16)
    return lax.optimization_barrier(lax.bitcast_convert_type(high, jnp.bfloat16))


def _mask(rows, floor, lo, hi):
    """Returns which of the block's rows each query reads, bool [block_q, block_kv].

    The last block of a kv_len that is no multiple of block_kv starts early to stay inside the array;
    its rows below `floor` belong to the block before.
    """
    return (rows >= jnp.maximum(lo, floor)[:, None]) & (rows <= hi[:, None])


def _read_blocks(static, caches, row, block):
    """Returns kv block `block` of each [B, K, S, H] array as [K, block_kv, H], and its row numbers."""
    block_kv = static.tiling.block_kv
    _, num_kv_heads, kv_len, head_dim = caches[0].shape
    if static.tiling.sequential and caches[0].dtype == jnp.bfloat16:
        # jax 0.10's CPU compiler widens a bfloat16 slice to float32 and hoists the widening of the
        # whole cache out of the loop; tying the cache to the loop counter keeps it in.
        block, *caches = lax.optimization_barrier((block, *caches))
    start = jnp.minimum(block * block_kv, kv_len - block_kv)
    size = (1, num_kv_heads, block_kv, head_dim)
    blocks = [lax.dynamic_slice(cache, (row, 0, start, 0), size)[0] for cache in caches]
    return *blocks, start + jnp.arange(block_kv)


# Tiles


def _pad_queries(x, *, length, fill=0):
    """Pads axis 1 at its end, so that tiles divide it."""
    if length == 0:
        return x
    return jnp.pad(x, [(0, 0), (0, length)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)


def _tile_reader(x, block_q) -> Callable:
    """Returns (row, index) -> the `block_q` entries of tile `index` of x [B, T, ...]'s row `row`."""

    def read(row, index):
        zeros = (0,) * (x.ndim - 2)
        return lax.dynamic_slice(x, (row, index * block_q, *zeros), (1, block_q, *x.shape[2:]))[0]

    return read


def _by_kv_head(x, num_kv_heads, *, reads):
    """[block_q, N, ...] to [K, G, block_q, ...], with zeros where the query reads nothing."""
    x = jnp.where(reads.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
    x = x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])
    return jnp.moveaxis(x, 0, 2)


def _by_query(x):
    """[K, G, block_q, ...] to [block_q, N, ...]."""
    x = jnp.moveaxis(x, 2, 0)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _map_tiles(tiling, tile, batch, num_tiles):
    """Returns tile(row, index) stacked: leaves [batch, num_tiles, ...]."""

    def row_tiles(row):
        if num_tiles == 1:
            return jax.tree.map(lambda x: x[None], tile(row, 0))
        return lax.map(lambda index: tile(row, index), jnp.arange(num_tiles))

    return _map_rows(tiling, row_tiles, batch)


def _map_rows(tiling, function, batch):
    """Returns function(row) for each batch row, stacked."""
    if batch == 1:
        return jax.tree.map(lambda x: x[None], function(0))
    rows = jnp.arange(batch)
    return lax.map(function, rows) if tiling.sequential else jax.vmap(function)(rows)
