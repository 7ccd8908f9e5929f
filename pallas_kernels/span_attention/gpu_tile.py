"""The arithmetic of one tile of queries on Mosaic GPU, shared by the prefill and the decode kernel.

A tile is 64 query rows held by one warpgroup: wgmma's height. Scores are kept in units of log2, so that
the exponential is the hardware's exp2; `TileMath.unit` turns a raw product into them. A softmax starts at
`TOP_FLOOR`, finite, and masked scores are -inf: a weight is then exactly zero, and never NaN, while its
row has seen no key.

Everything here is jnp on values and refs. Interpreted, the two products are jnp's instead of wgmma's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_ROWS = 64
TOP_FLOOR = -1e30
_CLEARED_COLUMNS = 64  # at a time: a wider piece would not fit beside the output in registers
_LOG2E = math.log2(math.e)
# Layouts of a [64, n] accumulator over a warpgroup's threads, and of one value a row or a column of it.
_MATRIX = plgpu.Layout.WGMMA
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class TileMath:
    """What the arithmetic is specialised on; `interpret` is None or a `plgpu.InterpretGPUParams`."""

    softmax_scale: float
    logits_soft_cap: float | None
    interpret: Any = None

    @property
    def unit(self) -> float:
        """What turns scores of `scores` into log2 units; with a soft cap they are already."""
        return 1.0 if self.logits_soft_cap is not None else self.softmax_scale * _LOG2E


class Softmax(NamedTuple):
    """An online softmax over the key rows seen so far, float32."""

    top: jax.Array  # [64] greatest score, log2 units
    total: jax.Array  # [64] sum of 2 ** (score - top)
    out: jax.Array  # [64, H] sum of 2 ** (score - top) * value


def pad_to_multiples(x: jax.Array, multiples: dict[int, int]) -> jax.Array:
    """Returns x with zeros behind it along the axes given, to the next multiple: TMA copies 8 x 64 tiles."""
    padding = [(0, -size % multiples.get(axis, 1)) for axis, size in enumerate(x.shape)]
    return x if not any(behind for _, behind in padding) else jnp.pad(x, padding)


def start_softmax(head_dim: int) -> Softmax:
    """Returns the softmax over no rows."""
    return Softmax(
        _full((TILE_ROWS,), TOP_FLOOR, _PER_ROW),
        _full((TILE_ROWS,), 0.0, _PER_ROW),
        _full((TILE_ROWS, head_dim), 0.0, _MATRIX),
    )


def load_rows(ref) -> jax.Array:
    """Returns ref [64] in device memory, one entry a query row."""
    return plgpu.load(ref, layout=_PER_ROW, optimized=False)  # pyright: ignore[reportCallIssue]


def scores(math: TileMath, queries, keys) -> jax.Array:
    """Returns the raw or, with a soft cap, capped scores [64, block_kv] of two refs in shared memory."""

    def product(out):
        plgpu.wgmma(out, queries, keys.transpose((1, 0)))
        return out[...]

    if math.interpret is None:
        raw = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE_ROWS, keys.shape[0]), jnp.float32))
    else:
        raw = _dot(_read(queries), _read(keys).T)
    if math.logits_soft_cap is None:
        return raw
    # cap * tanh(x / cap) as cap - 2 cap / (1 + exp(2 x / cap)): hardware's tanh has 11 bits.
    cap = math.logits_soft_cap * _LOG2E
    grown = 1.0 + jnp.exp2(raw * (2 * _LOG2E * math.softmax_scale / math.logits_soft_cap))
    return cap - 2 * cap * jnp.square(lax.rsqrt(grown))


def mask_scores(raw: jax.Array, first_row: jax.Array, lo: jax.Array, hi: jax.Array) -> jax.Array:
    """Returns raw [64, block_kv] with -inf where row `first_row` + column lies outside lo..hi [64]."""
    columns = plgpu.broadcasted_iota(jnp.int32, raw.shape, 1, layout=_MATRIX)
    lo, hi = (lax.broadcast_in_dim(x - first_row, raw.shape, [0]) for x in (lo, hi))
    return jnp.where((lo <= columns) & (columns <= hi), raw, -jnp.inf)


def rescale(math: TileMath, softmax: Softmax, raw: jax.Array, dtype) -> tuple[Softmax, jax.Array]:
    """Returns the softmax with the rows of raw [64, block_kv] counted, all but their values, and weights."""
    top = jnp.maximum(softmax.top, jnp.max(raw, axis=1) * math.unit)
    weights = jnp.exp2(raw * math.unit - lax.broadcast_in_dim(top, raw.shape, [0]))
    shrink = jnp.exp2(softmax.top - top)
    total = softmax.total * shrink + jnp.sum(weights, axis=1)
    out = softmax.out * lax.broadcast_in_dim(shrink, softmax.out.shape, [0])
    return Softmax(top, total, out), weights.astype(dtype)


def add_values(
    math: TileMath, softmax: Softmax, weights: jax.Array, values, meanwhile: Callable[[], None]
) -> Softmax:
    """Returns the softmax with weights [64, block_kv] @ values, a ref, added; `meanwhile` overlaps."""

    def product(out):
        plgpu.wgmma(out, weights, values)
        meanwhile()

    if math.interpret is None:
        return softmax._replace(out=pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(softmax.out)))
    out = softmax.out + _dot(weights, _read(values))
    meanwhile()
    return softmax._replace(out=out)


def clear_unread_rows(values, first_row: jax.Array, covers: Callable[[jax.Array], jax.Array]) -> None:
    """Zeroes the rows of values, a ref [64, H] of shared memory, that `covers` does not want.

    A weight of zero does not help against NaN: 0 * NaN is NaN. `covers` takes row numbers int32 [64] and
    returns int32 [64], 0 for a row to clear.
    """
    rows = first_row + plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=_PER_ROW)
    wanted = covers(rows)
    for column in range(0, values.shape[1], _CLEARED_COLUMNS):
        part = values.at[:, pl.ds(column, _CLEARED_COLUMNS)]
        there = plgpu.load(part, layout=_MATRIX)  # pyright: ignore[reportCallIssue]
        part[...] = jnp.where(
            lax.broadcast_in_dim(wanted, there.shape, [0]) > 0, there, jnp.zeros_like(there)
        )


def covers(lo, hi, start, count: int) -> Callable[[jax.Array], jax.Array]:
    """Returns row numbers [64] -> int32 [64]: 1 where one of `count` spans of refs lo, hi holds the row."""

    def held(rows):
        def query(t, found):
            first, last = lo[start + t], hi[start + t]
            return jnp.maximum(found, ((first <= rows) & (rows <= last)).astype(jnp.int32))

        return lax.fori_loop(0, count, query, jnp.zeros_like(rows))

    return held


def log2_total(softmax: Softmax, nothing: float) -> jax.Array:
    """Returns log2 of the denominator [64]; `nothing` where no row was seen."""
    seen = softmax.total != 0
    return jnp.where(seen, softmax.top + jnp.log2(jnp.where(seen, softmax.total, 1.0)), nothing)


def with_sink(softmax: Softmax, sink: jax.Array) -> Softmax:
    """Returns the softmax with a logit `sink`, a scalar, counted in the denominator."""
    sink = jnp.broadcast_to(sink * _LOG2E, softmax.top.shape)
    top = jnp.maximum(softmax.top, plgpu.layout_cast(sink, _PER_ROW))
    shrink = jnp.exp2(softmax.top - top)
    out = softmax.out * lax.broadcast_in_dim(shrink, softmax.out.shape, [0])
    return Softmax(top, softmax.total * shrink + jnp.exp2(sink - top), out)


def normalised(softmax: Softmax, reads: jax.Array) -> jax.Array:
    """Returns the output [64, H], float32; zeros where reads [64] is False, whatever the row holds."""
    share = jnp.where(reads, 1.0 / jnp.where(reads, softmax.total, 1.0), 0.0)
    shape = softmax.out.shape
    mask = lax.broadcast_in_dim(reads, shape, [0])
    return jnp.where(mask, softmax.out * lax.broadcast_in_dim(share, shape, [0]), 0.0)


def _full(shape: tuple[int, ...], value: float, layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32), precision="highest")


def _read(ref) -> jax.Array:
    """A ref of shared memory, read for the interpreter as wgmma would: ordered with the copies into it."""
    there = ref[...]
    plgpu.commit_smem()
    return there
