"""Span attention of few queries over many rows for Hopper GPUs: decode, from a cache or from pages.

The query heads of one key head and all queries of a batch row are packed into one tile of 64 rows, so that
every key row is read once. The kv blocks that the tile's spans touch are split over thread blocks, and in
each over two warpgroups, every other block to each (flash-decoding, Dao et al. 2023). Each leaves an output
and the log of its denominator; a small XLA program combines them. The kernel is bound by memory: that most
of the tile's rows are empty costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.span_attention import gpu_tile
from pallas_kernels.span_attention.blocks import canonical_spans, may_hold_unread_rows, tile_extents
from pallas_kernels.span_attention.gpu_tile import TILE_ROWS, TileMath, pad_to_multiples

_COMPUTE_WARPGROUPS = 2
_COMPUTE_REGISTERS, _COPY_REGISTERS = 232, 40
_LOG2E = math.log2(math.e)
_NO_ROWS = -1e30  # the log of an empty denominator, finite
# Thread blocks wanted: four for each of an H200's processors, which evens out the last wave.
_THREAD_BLOCKS = 4 * 132
_MIN_BLOCKS_A_SPLIT = 4


@dataclasses.dataclass(frozen=True)
class DecodeBlocks:
    """Key rows a step, a multiple of 64; steps in shared memory, even; thread blocks that share the rows."""

    block_kv: int
    stages: int
    splits: int


def default_decode_blocks(num_tiles: int, kv_len: int, head_dim: int) -> DecodeBlocks:
    """Returns the blocks for `num_tiles` pairs of a batch row and a key head."""
    block_kv = 128 if head_dim <= 64 else 64
    useful = max(1, -(-kv_len // block_kv) // _MIN_BLOCKS_A_SPLIT)
    splits = min(useful, max(1, -(-_THREAD_BLOCKS // max(num_tiles, 1))))
    return DecodeBlocks(block_kv=block_kv, stages=4 if head_dim <= 128 else 2, splits=splits)


def fits_one_tile(q_len: int, groups: int) -> bool:
    """Whether the packed queries of a batch row are few enough for this form."""
    return q_len * groups <= TILE_ROWS


class _Static(NamedTuple):
    math: TileMath
    blocks: DecodeBlocks
    page_rows: int | None


def decode_attention_gpu(
    math: TileMath, query, key, value, span_lo, span_hi, sinks, *, blocks: DecodeBlocks | None = None
) -> jax.Array:
    """Returns span attention [B, T, N, H] of query [B, T, N, H], T * N / K <= 64, over key [B, K, S, H].

    Arguments are `span_attention`'s. Where S is no multiple of 8 or head_dim none of 64, key and value are
    padded, which copies them.
    """
    num_kv_heads, kv_len = key.shape[1:3]
    blocks = blocks or default_decode_blocks(query.shape[0] * num_kv_heads, kv_len, query.shape[3])
    key, value = (pad_to_multiples(x, {2: 8, 3: 64}) for x in (key, value))
    lo, hi = canonical_spans(span_lo, span_hi, kv_len)
    return _attend(_Static(math, blocks, None), query, key, value, lo, hi, sinks, (), kv_len)


def paged_attention_gpu(
    math: TileMath,
    query,
    key_pages,
    value_pages,
    block_tables,
    sequence_ids,
    span_lo,
    span_hi,
    *,
    blocks: DecodeBlocks | None = None,
) -> jax.Array:
    """Returns span attention [C, N, H] of ragged columns over pages.

    Args:
      query: bfloat16 [C, N, H].
      key_pages, value_pages: [P, K, page_rows, H]; page_rows a multiple of 8 that divides 64, or of 64.
      block_tables: int32 [sequences, pages]: which page holds rows page * page_rows .. of a sequence.
      sequence_ids: int32 [C], the sequence of a column; -1 for a padding column, which gives zeros.
      span_lo, span_hi: int32 [C], row numbers in the column's sequence, inclusive.
    """
    num_pages, num_kv_heads, page_rows, head_dim = key_pages.shape
    if page_rows % 8 or (TILE_ROWS % page_rows and page_rows % TILE_ROWS):
        raise NotImplementedError(
            f"the Mosaic GPU kernel takes pages of 8, 16, 32 or a multiple of 64 rows; got {page_rows}"
        )
    kv_len = block_tables.shape[1] * page_rows
    blocks = blocks or default_decode_blocks(query.shape[0] * num_kv_heads, kv_len, head_dim)
    if page_rows > blocks.block_kv and page_rows % blocks.block_kv:
        blocks = dataclasses.replace(blocks, block_kv=TILE_ROWS)
    key_pages, value_pages = (pad_to_multiples(x, {3: 64}) for x in (key_pages, value_pages))
    lo, hi = canonical_spans(span_lo, jnp.where(sequence_ids < 0, -1, span_hi), kv_len)
    pages = pad_to_multiples(
        jnp.clip(block_tables, 0, num_pages - 1), {1: max(1, blocks.block_kv // page_rows)}
    )
    paged = (pages, jnp.maximum(sequence_ids, 0))
    static = _Static(math, blocks, page_rows)
    out = _attend(
        static, query[:, None], key_pages, value_pages, lo[:, None], hi[:, None], None, paged, kv_len
    )
    return out[:, 0]


def _attend(static, query, key, value, lo, hi, sinks, paged, kv_len):
    batch, q_len, num_q_heads, head_dim = query.shape
    num_kv_heads, padded_dim = key.shape[1], key.shape[3]
    groups, splits = num_q_heads // num_kv_heads, static.blocks.splits
    num_rows, num_parts = q_len * groups, splits * _COMPUTE_WARPGROUPS
    packed = query.reshape(batch, q_len, num_kv_heads, groups, head_dim).transpose(0, 2, 1, 3, 4)
    packed = packed.reshape(batch, num_kv_heads, num_rows, head_dim)
    packed = pad_to_multiples(packed, {2: TILE_ROWS, 3: 64})
    unread = may_hold_unread_rows(lo, hi, kv_len=kv_len, block_kv=static.blocks.block_kv)
    table = _split_table(lo, hi, static.blocks, kv_len)
    behind = ((0, 0), (0, TILE_ROWS - num_rows))
    lo = jnp.pad(jnp.repeat(lo, groups, axis=1), behind, constant_values=kv_len)
    hi = jnp.pad(jnp.repeat(hi, groups, axis=1), behind, constant_values=-1)
    kept_rows = num_rows + -num_rows % 8
    parts, logs = plgpu.kernel(
        functools.partial(_kernel, static, kept_rows),
        out_type=(
            jax.ShapeDtypeStruct((batch, num_kv_heads, num_parts, kept_rows, padded_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, num_kv_heads, num_parts, TILE_ROWS), jnp.float32),
        ),
        scratch_types=_scratch(static, padded_dim, query.dtype),
        grid=(splits, num_kv_heads, batch),
        grid_names=("split", "kv_head", "batch"),
        num_threads=_COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=static.math.interpret,
        kernel_name="span_decode_attention",
    )(packed, key, value, lo, hi, table, unread, *paged)
    sink = None
    if sinks is not None:
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, groups), (1, q_len))
    out = combine_parts(parts[:, :, :, :num_rows, :head_dim], logs[..., :num_rows], sink)
    out = out.reshape(batch, num_kv_heads, q_len, groups, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(query.shape).astype(query.dtype)


def combine_parts(parts: jax.Array, logs: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Returns the softmax's output [B, K, R, H], float32, of its parts' outputs.

    Args:
      parts: [B, K, parts, R, H], each part's own softmax applied to its rows' values.
      logs: float32 [B, K, parts, R], log2 of each part's denominator.
      sink: float32 [K, R], a logit counted in the denominator, or None.
    """
    top = jnp.max(logs, axis=2, keepdims=True)
    if sink is not None:
        sink = sink[None, :, None] * _LOG2E
        top = jnp.maximum(top, sink)
    weights = jnp.exp2(logs - top)
    total = jnp.sum(weights, axis=2)
    if sink is not None:
        total += jnp.exp2(sink - top)[:, :, 0]
    return jnp.sum(weights[..., None] * parts.astype(jnp.float32), axis=2) / total[..., None]


# Entries of the split table: kv blocks of a split, first and end; blocks in every span, first and end.
_FIRST, _END, _WHOLE_FIRST, _WHOLE_END = range(4)


def _split_table(lo: jax.Array, hi: jax.Array, blocks: DecodeBlocks, kv_len: int) -> jax.Array:
    """Returns int32 [B, splits, 4] of canonical spans [B, T]: even shares of the blocks that a row reads."""
    tile = tile_extents(lo, hi, kv_len=kv_len, block_kv=blocks.block_kv)
    steps = (tile.end_block - tile.first_block)[:, None]
    edges = (
        tile.first_block[:, None] + jnp.arange(blocks.splits + 1, dtype=jnp.int32) * steps // blocks.splits
    )
    whole_first = (tile.shared_lo + blocks.block_kv - 1) // blocks.block_kv
    whole = (whole_first, (tile.shared_hi + 1) // blocks.block_kv)
    every = [jnp.broadcast_to(x[:, None], edges[:, 1:].shape) for x in whole]
    return jnp.stack([edges[:, :-1], edges[:, 1:], *every], axis=-1).astype(jnp.int32)


class _Ring(NamedTuple):
    """Slots of shared memory that kv blocks pass through, and what tells when one is full and free."""

    slots: Any  # [stages, block_kv, H]
    arrived: Any
    consumed: Any


def _scratch(static, head_dim: int, dtype) -> dict:
    tiling = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
    layout = (tiling, plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    blocks = static.blocks
    slots = plgpu.SMEM((blocks.stages, blocks.block_kv, head_dim), dtype, transforms=layout)
    copies = 1 if static.page_rows is None else max(1, blocks.block_kv // static.page_rows)
    arrived = plgpu.Barrier(num_arrivals=copies, num_barriers=blocks.stages)
    consumed = plgpu.Barrier(num_barriers=blocks.stages)
    return dict(
        tiles_smem=plgpu.SMEM((_COMPUTE_WARPGROUPS, TILE_ROWS, head_dim), dtype, transforms=layout),
        logs_smem=plgpu.SMEM((_COMPUTE_WARPGROUPS, TILE_ROWS), jnp.float32),
        keys=_Ring(slots, arrived, consumed),
        values=_Ring(slots, arrived, consumed),
        query_arrived=plgpu.Barrier(num_barriers=_COMPUTE_WARPGROUPS),
    )


def _kernel(static, kept_rows, *refs, tiles_smem, logs_smem, keys, values, query_arrived):
    query, key, value, lo, hi, table, unread, *paged, parts, logs = refs
    split, kv_head, batch = (lax.axis_index(name) for name in ("split", "kv_head", "batch"))
    warpgroup = lax.axis_index("warpgroup")
    first, end = table[batch, split, _FIRST], table[batch, split, _END]

    @pl.when(warpgroup < _COMPUTE_WARPGROUPS)
    def compute():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        tile = tiles_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(query.at[batch, kv_head], tile, query_arrived.at[warpgroup])
        whole = (table[batch, split, _WHOLE_FIRST], table[batch, split, _WHOLE_END])
        spans = (lo.at[batch], hi.at[batch], unread.at[batch])
        plgpu.barrier_wait(query_arrived.at[warpgroup])
        softmax = _walk(static, tile, keys, values, spans, (first, end), whole)
        part = split * _COMPUTE_WARPGROUPS + warpgroup
        tile[...] = gpu_tile.normalised(softmax, softmax.total != 0).astype(tile.dtype)
        logs_smem.at[warpgroup][...] = gpu_tile.log2_total(softmax, _NO_ROWS)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, kept_rows)], parts.at[batch, kv_head, part])
        plgpu.copy_smem_to_gmem(logs_smem.at[warpgroup], logs.at[batch, kv_head, part])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _COMPUTE_WARPGROUPS)
    def copy():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        sources = ((key, keys), (value, values))
        place = (batch, kv_head) if not paged else (paged[0].at[paged[1][batch]], kv_head)
        _stream(static, sources, place, first, end)


def _walk(static, tile, keys, values, spans, visited, whole) -> gpu_tile.Softmax:
    """Runs the tile over every second kv block of first .. end - 1, from the warpgroup's number on."""
    lo, hi, unread = spans
    first, end = visited
    whole_first, whole_end = whole
    warpgroup, block_kv = lax.axis_index("warpgroup"), static.blocks.block_kv
    tile_lo, tile_hi = gpu_tile.load_rows(lo), gpu_tile.load_rows(hi)

    def visit(turn, softmax):
        place = turn * _COMPUTE_WARPGROUPS + warpgroup
        step, slot = first + place, lax.rem(place, jnp.int32(static.blocks.stages))
        plgpu.barrier_wait(keys.arrived.at[slot])
        raw = gpu_tile.scores(static.math, tile, keys.slots.at[slot])
        plgpu.barrier_arrive(keys.consumed.at[slot])
        raw = lax.cond(
            (whole_first <= step) & (step < whole_end),
            lambda raw: raw,
            lambda raw: gpu_tile.mask_scores(raw, step * block_kv, tile_lo, tile_hi),
            raw,
        )
        softmax, weights = gpu_tile.rescale(static.math, softmax, raw, tile.dtype)
        plgpu.barrier_wait(values.arrived.at[slot])
        pl.when(unread[step] > 0)(lambda: _clear(values.slots.at[slot], lo, hi, step * block_kv))
        softmax = gpu_tile.add_values(static.math, softmax, weights, values.slots.at[slot], lambda: None)
        plgpu.barrier_arrive(values.consumed.at[slot])
        return softmax

    turns = (end - first - warpgroup + 1) // _COMPUTE_WARPGROUPS
    return lax.fori_loop(0, turns, visit, gpu_tile.start_softmax(tile.shape[1]))


def _clear(values, lo, hi, first_row):
    """Zeroes the rows of a kv block that no span of the tile holds."""
    for chunk in range(0, values.shape[0], TILE_ROWS):
        part = values.at[pl.ds(chunk, TILE_ROWS)]
        gpu_tile.clear_unread_rows(part, first_row + chunk, gpu_tile.covers(lo, hi, 0, TILE_ROWS))
    plgpu.commit_smem()


def _stream(static, sources, place, first, end):
    """Copies kv blocks first .. end - 1 of the sources through their rings."""
    blocks, page_rows = static.blocks, static.page_rows
    owner, kv_head = place

    def copy(source, ring, step, slot):
        slots, arrived = ring.slots.at[slot], ring.arrived.at[slot]
        row = step * blocks.block_kv
        if page_rows is None:
            plgpu.copy_gmem_to_smem(source.at[owner, kv_head, pl.ds(row, blocks.block_kv)], slots, arrived)
            return
        copied = min(page_rows, blocks.block_kv)
        for start in range(0, blocks.block_kv, copied):
            page = owner[(row + start) // page_rows]
            rows = pl.ds(lax.rem(row + start, jnp.int32(page_rows)), copied)
            plgpu.copy_gmem_to_smem(source.at[page, kv_head, rows], slots.at[pl.ds(start, copied)], arrived)

    def step(place, _):
        slot = lax.rem(place, jnp.int32(blocks.stages))
        for source, ring in sources:
            pl.when(place >= blocks.stages)(lambda ring=ring: plgpu.barrier_wait(ring.consumed.at[slot]))
            copy(source, ring, first + place, slot)

    lax.fori_loop(0, end - first, step, None)
