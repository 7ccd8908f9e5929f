"""The TPU kernel itself (Pallas on Mosaic): an online softmax over the steps of a schedule.

Grid: head, step. A step is one kv block of one tile of query rows (`tpu_schedule.py`); its blocks are
fetched while the step before computes, also across tiles. Rows of queries, keys and outputs are what the
caller laid out: single query heads (prefill), all query heads of a key head (decode), pages (paged).

Per-query values (running maximum and sum, span bounds) are held 128 lanes wide, [block_q, 128]: columns
of width one would cost a cross-lane move at every use.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.span_attention.tpu_schedule import (
    INTERIOR,
    MASKED,
    MASKED_WITH_GAP,
    Schedule,
    Visit,
    read_visit,
)
from pallas_kernels.span_attention.xla import SCORE_FLOOR

LANES = 128


@dataclasses.dataclass(frozen=True)
class Program:
    """What one kernel is specialised on."""

    softmax_scale: float
    logits_soft_cap: float | None
    block_q: int  # query rows of a tile
    block_kv: int  # key rows of a step
    groups: int  # heads of `query` that read the same key head
    page_rows: int | None = None  # rows of a page; None: the cache has no pages
    interpret: object = False  # bool or pltpu.InterpretParams
    visit: Callable[..., Visit] = read_visit  # profilers put a schedule known at compile time here

    @property
    def kv_parts(self) -> int:
        """How many arrays make up the block of keys: the pages of a step."""
        return 1 if self.page_rows is None else self.block_kv // self.page_rows


class Operands(NamedTuple):
    """The arrays of one call, in the kernel's layouts."""

    query: jax.Array  # [rows, heads, queries, H]; the row is the tile's, the last tile may be cut
    key: jax.Array  # [B, K, S, H], or pages [P, K, page_rows, H]
    value: jax.Array
    span_lo: jax.Array  # int32 [tiles, block_q] canonical
    span_hi: jax.Array
    sequence_ids: jax.Array | None  # int32 [tiles, block_q]; pages only
    block_tables: jax.Array | None  # int32 [sequences, pages]; pages only
    sinks: jax.Array | None  # float32 [heads, block_q]


class _Refs(NamedTuple):
    """What the kernel sees: prefetched scalars, inputs, the output, scratch that lives through a tile."""

    steps: jax.Array
    hulls: jax.Array
    block_tables: jax.Array | None
    query: jax.Array
    keys: tuple
    values: tuple
    span_lo: jax.Array
    span_width: jax.Array
    sequence_ids: jax.Array | None
    sinks: jax.Array | None
    out: jax.Array
    lo: jax.Array
    width: jax.Array
    top: jax.Array
    total: jax.Array
    weighted: jax.Array


def attend_tiles(program: Program, operands: Operands, schedule: Schedule) -> jax.Array:
    """Returns the attention of every query row, in the shape and dtype of `operands.query`."""
    _, heads, _, head_dim = operands.query.shape
    block_q, parts = program.block_q, program.kv_parts
    scalars = [schedule.steps, schedule.hulls]
    if operands.block_tables is not None:
        scalars.append(operands.block_tables)
    width = operands.span_hi - operands.span_lo + 1
    row_values = [operands.span_lo, jnp.maximum(width, 0)]
    if operands.sequence_ids is not None:
        row_values.append(operands.sequence_ids)
    if operands.sinks is not None:
        row_values.append(operands.sinks)
    tile_spec, kv_specs, row_spec, head_spec = _specs(program, operands)
    row_specs = [row_spec] * (len(row_values) - (operands.sinks is not None))
    row_specs += [head_spec] * (operands.sinks is not None)

    def kernel(*refs):
        _kernel(program, _named(program, operands, refs))

    def lane_wide(dtype):
        return pltpu.VMEM((block_q, LANES), dtype)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(heads, schedule.num_steps),
            in_specs=[tile_spec, *kv_specs, *kv_specs, *row_specs],
            out_specs=tile_spec,
            scratch_shapes=[
                lane_wide(jnp.int32),
                lane_wide(jnp.int32),
                lane_wide(jnp.float32),
                lane_wide(jnp.float32),
                pltpu.VMEM((block_q, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(operands.query.shape, operands.query.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=program.interpret,
        name="span_attention" if program.page_rows is None else "paged_span_attention",
    )(
        *scalars,
        operands.query,
        *[operands.key] * parts,
        *[operands.value] * parts,
        *map(_as_row_blocks, row_values),
    )


def _specs(program: Program, operands: Operands):
    """Returns the block specs of query and output, of the parts of keys, of values a row, and a head."""
    rows, _, queries, head_dim = operands.query.shape
    tiles_per_row = pl.cdiv(queries, program.block_q)
    pages = operands.block_tables
    packed = program.block_q % LANES == 0

    def tile_index(head, step, steps, *_):
        visit = program.visit(steps, step)
        if rows == 1:
            return 0, head, visit.tile, 0
        return visit.source, head, visit.tile - visit.source * tiles_per_row, 0

    def kv_index(part, head, step, steps, hulls, *tables):
        visit = program.visit(steps, step)
        head = head // program.groups
        if pages is None:
            return visit.source, head, visit.block, 0
        # Pages past a sequence's last are fetched and masked: whatever stands there, stay in the arrays.
        page = jnp.minimum(visit.block * program.kv_parts + part, pages.shape[1] - 1)
        page = tables[0][visit.source, page]
        return jnp.clip(page, 0, operands.key.shape[0] - 1), head, 0, 0

    def row_index(head, step, steps, *_):
        return program.visit(steps, step).tile, 0, 0

    tile = pl.BlockSpec((None, None, program.block_q, head_dim), tile_index)
    kv_rows = program.page_rows or program.block_kv
    kv = [
        pl.BlockSpec((None, None, kv_rows, head_dim), functools.partial(kv_index, part))
        for part in range(program.kv_parts)
    ]
    row_shape = (None, 1, program.block_q) if packed else (None, program.block_q, LANES)
    head = pl.BlockSpec(row_shape, lambda head, step, *_: (head, 0, 0))
    return tile, kv, pl.BlockSpec(row_shape, row_index), head


def _as_row_blocks(x: jax.Array) -> jax.Array:
    """[n, block_q] as the kernel fetches it: packed along lanes; few rows as they are used, lane-wide."""
    if x.shape[1] % LANES == 0:
        return x[:, None]
    return jnp.broadcast_to(x[..., None], (*x.shape, LANES))


def _named(program: Program, operands: Operands, refs) -> _Refs:
    refs = iter(refs)
    return _Refs(
        steps=next(refs),
        hulls=next(refs),
        block_tables=None if operands.block_tables is None else next(refs),
        query=next(refs),
        keys=tuple(next(refs) for _ in range(program.kv_parts)),
        values=tuple(next(refs) for _ in range(program.kv_parts)),
        span_lo=next(refs),
        span_width=next(refs),
        sequence_ids=None if operands.sequence_ids is None else next(refs),
        sinks=None if operands.sinks is None else next(refs),
        out=next(refs),
        lo=next(refs),
        width=next(refs),
        top=next(refs),
        total=next(refs),
        weighted=next(refs),
    )


# The stages of a step


def _kernel(program: Program, refs: _Refs) -> None:
    visit = program.visit(refs.steps, pl.program_id(1))

    @pl.when(visit.first)
    def _():
        _start(refs)

    @pl.when(visit.kind == INTERIOR)
    def _():
        _add_block(program, refs, None, _joined(refs.values))

    # Value rows that no span holds may be NaN, and 0 * NaN is NaN: they are zeroed, by the hull of the
    # tile's spans where that has no gap, else by what the mask holds.
    @pl.when(visit.kind == MASKED)
    def _():
        values = _joined(refs.values)
        index = visit.tile
        if refs.block_tables is not None:
            index = visit.tile * refs.block_tables.shape[0] + visit.source
        rows = visit.block * program.block_kv + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        held = (refs.hulls[0, index] <= rows) & (rows <= refs.hulls[1, index])
        _add_block(program, refs, _mask(program, refs, visit), jnp.where(held, values, 0))

    @pl.when(visit.kind == MASKED_WITH_GAP)
    def _():
        values, mask = _joined(refs.values), _mask(program, refs, visit)
        ones = jnp.ones((program.block_q, values.shape[1]), jnp.bfloat16)
        held = _product(mask.astype(jnp.float32).astype(jnp.bfloat16), ones, contract=(0, 0)) > 0
        _add_block(program, refs, mask, jnp.where(held, values, 0))

    @pl.when(visit.last)
    def _():
        _finish(program, refs)


def _start(refs: _Refs) -> None:
    refs.lo[...] = _lane_wide(refs.span_lo)
    refs.width[...] = _lane_wide(refs.span_width)
    refs.top[...] = jnp.full_like(refs.top, SCORE_FLOOR)
    refs.total[...] = jnp.zeros_like(refs.total)
    refs.weighted[...] = jnp.zeros_like(refs.weighted)


def _mask(program: Program, refs: _Refs, visit: Visit) -> jax.Array:
    """Returns which rows of the block each query reads, bool [block_q, block_kv]."""
    shape = (program.block_q, program.block_kv)
    width = refs.width[...]
    if refs.sequence_ids is not None:
        width = jnp.where(_lane_wide(refs.sequence_ids) == visit.source, width, 0)
    # One unsigned compare: a row below lo wraps to a huge number.
    start = visit.block * program.block_kv - refs.lo[...]
    offset = lax.broadcasted_iota(jnp.int32, shape, 1) + _repeat_lanes(start, shape[1])
    return offset.astype(jnp.uint32) < _repeat_lanes(width, shape[1]).astype(jnp.uint32)


def _add_block(program: Program, refs: _Refs, mask: jax.Array | None, values: jax.Array) -> None:
    """Adds the step's block to the running softmax; scores stay in units of `unit` until the exponential."""
    scores = _product(refs.query[...], _joined(refs.keys), contract=(1, 1))
    unit = program.softmax_scale
    if program.logits_soft_cap is not None:
        scores = jnp.tanh(scores * (program.softmax_scale / program.logits_soft_cap))
        unit = program.logits_soft_cap
    if mask is not None:
        scores = jnp.where(mask, scores, SCORE_FLOOR)
    old = refs.top[...]
    new = jnp.maximum(old, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp((scores - _repeat_lanes(new, program.block_kv)) * unit)
    rescale = jnp.exp((old - new) * unit)
    refs.top[...] = new
    refs.total[...] = refs.total[...] * rescale + _sum_lane_groups(weights)
    kept = refs.weighted[...] * _repeat_lanes(rescale, values.shape[1])
    refs.weighted[...] = kept + _product(weights.astype(values.dtype), values, contract=(1, 0))


def _finish(program: Program, refs: _Refs) -> None:
    """Writes the tile's output; rows that read nothing are zeros."""
    denominator = jnp.broadcast_to(jnp.sum(refs.total[...], axis=-1, keepdims=True), refs.total.shape)
    factor = jnp.ones_like(denominator)
    if refs.sinks is not None:
        unit = program.logits_soft_cap or program.softmax_scale
        top, sink = refs.top[...] * unit, _lane_wide(refs.sinks)
        shifted = jnp.maximum(top, sink)
        factor = jnp.exp(top - shifted)
        denominator = denominator * factor + jnp.exp(sink - shifted)
    reads = refs.width[...] > 0
    factor = jnp.where(reads, factor / jnp.where(reads, denominator, 1), 0)
    lanes = refs.weighted.shape[1]
    factor, reads = _repeat_lanes(factor, lanes), _repeat_lanes(reads.astype(jnp.int32), lanes)
    refs.out[...] = jnp.where(reads > 0, refs.weighted[...] * factor, 0).astype(refs.out.dtype)


# Registers


def _joined(parts) -> jax.Array:
    return parts[0][...] if len(parts) == 1 else jnp.concatenate([part[...] for part in parts], axis=0)


def _product(left, right, *, contract):
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _lane_wide(rows):
    """Values a row as [block_q, 128], every lane the same: turned where packed [1, block_q]."""
    if rows.shape[0] != 1:
        return rows[...]
    return jnp.broadcast_to(rows[...], (LANES, rows.shape[1])).T


def _repeat_lanes(x, lanes):
    """[block_q, 128] to [block_q, lanes] for x whose lanes are all the same."""
    if lanes <= LANES:
        return x[:, :lanes]
    whole = jnp.concatenate([x] * pl.cdiv(lanes, LANES), axis=1)
    return whole if lanes % LANES == 0 else whole[:, :lanes]


def _sum_lane_groups(x):
    """[block_q, block_kv] to [block_q, 128]: sums of every 128th column; adds whole registers only."""
    return functools.reduce(jnp.add, [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)])
