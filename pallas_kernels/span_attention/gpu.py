"""Span attention for Hopper GPUs (Pallas on Mosaic GPU): wgmma, TMA, one warpgroup that only copies.

A thread block holds two tiles of 64 queries of one head, one a warpgroup; a third warpgroup streams the kv
blocks that any of their spans touches through a ring of shared memory slots. The two take turns on the
tensor cores: one computes its exponentials while the other multiplies (FlashAttention-3, Shah et al. 2024,
section 3.1). Which blocks a tile visits, and which lie in all of its spans and go without masking, are
numbers computed beforehand by XLA. Few queries (decode) take the form of `gpu_decode.py`.

Value rows that no span holds may be NaN, which a weight of zero would spread. XLA marks the kv blocks that
may hold such a row; only those are cleared, row by row, in shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.span_attention import gpu_tile
from pallas_kernels.span_attention.blocks import canonical_spans, may_hold_unread_rows, tile_extents
from pallas_kernels.span_attention.gpu_decode import decode_attention_gpu, fits_one_tile
from pallas_kernels.span_attention.gpu_tile import TILE_ROWS, TileMath, pad_to_multiples
from pallas_kernels.span_attention.xla import pull_back

MAX_HEAD_DIM = 256
_COMPUTE_WARPGROUPS = 2
_BLOCK_Q = _COMPUTE_WARPGROUPS * TILE_ROWS
# Registers a thread: the copying warpgroup gives away what the computing ones need.
_COMPUTE_REGISTERS, _COPY_REGISTERS = 232, 40


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Key rows a step, a multiple of 64, and how many steps are in shared memory at once."""

    block_kv: int
    stages: int


def default_blocks(head_dim: int) -> BlockSizes:
    """Returns the blocks for a padded head_dim: what fits into 227 KiB of shared memory."""
    if head_dim <= 64:
        return BlockSizes(block_kv=128, stages=4)
    return BlockSizes(block_kv=128, stages=2) if head_dim <= 128 else BlockSizes(block_kv=64, stages=2)


def unsupported(query: jax.Array) -> str | None:
    """Returns why this kernel cannot take query [B, T, N, H], None where it can."""
    if query.dtype != jnp.bfloat16:
        return f"it takes bfloat16, what wgmma multiplies; got {query.dtype}"
    if query.shape[3] > MAX_HEAD_DIM:
        return f"it takes a head_dim of at most {MAX_HEAD_DIM}; got {query.shape[3]}"
    return None


class _Static(NamedTuple):
    math: TileMath
    blocks: BlockSizes | None  # None: few queries, the form of gpu_decode.py


def span_attention_gpu(
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
    interpret: Any = None,
) -> jax.Array:
    """Returns what `span_attention_reference` means, [B, T, N, H]; gradients go through the XLA form.

    Arguments are the reference's. Where S is no multiple of 8 or head_dim none of 64, key and value are
    padded, which copies them. `blocks` overrides the block sizes, and the form that few queries take;
    `interpret`, a `plgpu.InterpretGPUParams`, runs the kernel on a CPU.
    """
    math = TileMath(softmax_scale, logits_soft_cap, interpret)
    if blocks is None and not fits_one_tile(query.shape[1], query.shape[2] // key.shape[1]):
        blocks = default_blocks(query.shape[3])
    static = _Static(math, blocks)
    return _attend(static, query, key, value, span_lo, span_hi, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, span_lo, span_hi, sinks):
    return _forward(static, query, key, value, span_lo, span_hi, sinks)


def _attend_fwd(static, *arrays):
    return _forward(static, *arrays), arrays


def _attend_bwd(static, arrays, d_out):
    return pull_back(arrays, d_out, static.math.softmax_scale, static.math.logits_soft_cap)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(static, query, key, value, span_lo, span_hi, sinks):
    batch, q_len, num_q_heads, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    num_tiles = pl.cdiv(q_len, _BLOCK_Q)
    if static.blocks is None:
        return decode_attention_gpu(static.math, query, key, value, span_lo, span_hi, sinks)
    query = pad_to_multiples(query, {1: 8, 3: 64})
    key, value = (pad_to_multiples(x, {2: 8, 3: 64}) for x in (key, value))
    lo, hi = canonical_spans(span_lo, span_hi, kv_len)
    unread = may_hold_unread_rows(lo, hi, kv_len=kv_len, block_kv=static.blocks.block_kv)
    padding = ((0, 0), (0, num_tiles * _BLOCK_Q - q_len))
    lo = jnp.pad(lo, padding, constant_values=kv_len)
    hi = jnp.pad(hi, padding, constant_values=-1)
    tiles = _tile_table(lo, hi, kv_len=kv_len, block_kv=static.blocks.block_kv)
    sink = () if sinks is None else (sinks.astype(jnp.float32),)
    out = plgpu.kernel(
        functools.partial(_kernel, static, num_q_heads // num_kv_heads, sinks is not None),
        out_type=jax.ShapeDtypeStruct(query.shape, query.dtype),
        scratch_types=_scratch(static.blocks, query.shape[3], query.dtype),
        grid=(num_q_heads, num_tiles, batch),
        grid_names=("head", "tile", "batch"),
        num_threads=_COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=static.math.interpret,
        kernel_name="span_attention",
    )(query, key, value, lo, hi, tiles, unread, *sink)
    return out[:, :q_len, :, :head_dim]


# Entries of a row of the tile table: of the block's both tiles together, then of each tile.
_FIRST, _END, _OF_TILE, _TILE_ENTRIES = 0, 1, 2, 4


def _tile_table(lo: jax.Array, hi: jax.Array, *, kv_len: int, block_kv: int) -> jax.Array:
    """Returns int32 [B, thread blocks, 2 + 2 * 4] of canonical spans padded to whole thread blocks.

    A row: the kv blocks visited, first and end; then for each of the two tiles the blocks it visits,
    first and end, and those of them that every span of it holds, first and end.
    """
    batch = lo.shape[0]
    lo, hi = (x.reshape(batch, -1, _COMPUTE_WARPGROUPS, TILE_ROWS) for x in (lo, hi))
    tile = tile_extents(lo, hi, kv_len=kv_len, block_kv=block_kv)
    visits = tile.first_block < tile.end_block
    whole_first = (tile.shared_lo + block_kv - 1) // block_kv
    whole_end = (tile.shared_hi + 1) // block_kv
    end = jnp.max(tile.end_block, axis=-1, keepdims=True)
    first = jnp.minimum(jnp.min(jnp.where(visits, tile.first_block, kv_len), axis=-1, keepdims=True), end)
    # A tile that visits nothing has its place at the thread block's first step, which it skips.
    own = [jnp.maximum(tile.first_block, first), jnp.maximum(tile.end_block, first), whole_first, whole_end]
    return jnp.concatenate([first, end, jnp.stack(own, axis=-1).reshape(batch, -1, 8)], axis=-1)


def _scratch(blocks: BlockSizes, head_dim: int, dtype) -> dict:
    tiling = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
    layout = (tiling, plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    slots = plgpu.SMEM((blocks.stages, blocks.block_kv, head_dim), dtype, transforms=layout)
    arrived = plgpu.Barrier(num_barriers=blocks.stages)
    consumed = plgpu.Barrier(num_arrivals=_COMPUTE_WARPGROUPS, num_barriers=blocks.stages)
    return dict(
        tiles_smem=plgpu.SMEM((_COMPUTE_WARPGROUPS, TILE_ROWS, head_dim), dtype, transforms=layout),
        keys=_Ring(slots, arrived, consumed),
        values=_Ring(slots, arrived, consumed),
        query_arrived=plgpu.Barrier(num_barriers=_COMPUTE_WARPGROUPS),
        turns=plgpu.Barrier(num_barriers=_COMPUTE_WARPGROUPS),
        cleared=plgpu.Barrier(num_arrivals=_COMPUTE_WARPGROUPS),
    )


class _Ring(NamedTuple):
    """Slots of shared memory that kv blocks pass through, and what tells when one is full and free."""

    slots: Any  # [stages, block_kv, H]
    arrived: Any
    consumed: Any


def _kernel(static, groups, has_sinks, *refs, tiles_smem, keys, values, query_arrived, turns, cleared):
    query, key, value, lo, hi, tiles, unread, *sinks, out = refs
    head, batch = lax.axis_index("head"), lax.axis_index("batch")
    block = tiles.shape[1] - 1 - lax.axis_index("tile")  # under a causal mask the longest come first
    warpgroup = lax.axis_index("warpgroup")
    first, end = tiles[batch, block, _FIRST], tiles[batch, block, _END]

    @pl.when(warpgroup < _COMPUTE_WARPGROUPS)
    def compute():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        rows = pl.ds(block * _BLOCK_Q + warpgroup * TILE_ROWS, TILE_ROWS)
        tile = tiles_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(query.at[batch, rows, head], tile, query_arrived.at[warpgroup])
        spans = _Spans(
            lo.at[batch],
            hi.at[batch],
            block,
            gpu_tile.load_rows(lo.at[batch, rows]),
            gpu_tile.load_rows(hi.at[batch, rows]),
            unread.at[batch],
        )
        entries = [tiles[batch, block, _OF_TILE + _TILE_ENTRIES * warpgroup + i] for i in range(4)]
        barriers = _Barriers(turns, cleared)
        plgpu.barrier_wait(query_arrived.at[warpgroup])
        softmax = _walk(static, tile, keys, values, spans, barriers, (first, end), entries)
        if has_sinks:
            softmax = gpu_tile.with_sink(softmax, sinks[0][head])
        tile[...] = gpu_tile.normalised(softmax, spans.tile_lo <= spans.tile_hi).astype(tile.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _COMPUTE_WARPGROUPS)
    def copy():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        kv_head = head // groups
        _stream(static.blocks, key.at[batch, kv_head], value.at[batch, kv_head], keys, values, first, end)


class _Spans(NamedTuple):
    """The spans a thread block needs: refs of its batch row's, and its own tile's values."""

    lo: Any  # ref [T]
    hi: Any
    block: jax.Array  # which thread block along T
    tile_lo: jax.Array  # [64]
    tile_hi: jax.Array
    unread: Any  # ref [kv blocks]


class _Barriers(NamedTuple):
    turns: Any  # one a computing warpgroup: it may use the tensor cores
    cleared: Any  # a block's unread rows are cleared


def _walk(static, tile, keys, values, spans, barriers, visited, entries) -> gpu_tile.Softmax:
    """Runs a tile over the kv blocks `visited` by its thread block, skipping those that are not its own.

    Both warpgroups pass every block, since both must free its slot and each clears half of it.
    """
    first, end = visited
    tile_first, tile_end, whole_first, whole_end = entries
    warpgroup = lax.axis_index("warpgroup")
    math, block_kv, stages = static.math, static.blocks.block_kv, static.blocks.stages

    def slot_of(step):
        return lax.rem(step - first, jnp.int32(stages))

    def give_turn():
        plgpu.barrier_arrive(barriers.turns.at[1 - warpgroup])

    def take_turn():
        plgpu.barrier_wait(barriers.turns.at[warpgroup])

    def wait_for_keys(step):
        pl.when(step < end)(lambda: plgpu.barrier_wait(keys.arrived.at[slot_of(step)]))

    def wait_for_values(step):
        plgpu.barrier_wait(values.arrived.at[slot_of(step)])
        pl.when(spans.unread[step] > 0)(lambda: _clear(values.slots.at[slot_of(step)], spans, barriers, step))

    def skip(step, _):
        give_turn()
        plgpu.barrier_arrive(keys.consumed.at[slot_of(step)])
        wait_for_values(step)
        take_turn()
        wait_for_keys(step + 1)
        plgpu.barrier_arrive(values.consumed.at[slot_of(step)])

    def visit(step, softmax):
        slot = slot_of(step)
        raw = gpu_tile.scores(math, tile, keys.slots.at[slot])
        give_turn()
        plgpu.barrier_arrive(keys.consumed.at[slot])
        raw = lax.cond(
            (whole_first <= step) & (step < whole_end),
            lambda raw: raw,
            lambda raw: gpu_tile.mask_scores(raw, step * block_kv, spans.tile_lo, spans.tile_hi),
            raw,
        )
        softmax, weights = lax.optimization_barrier(gpu_tile.rescale(math, softmax, raw, tile.dtype))
        wait_for_values(step)
        take_turn()
        softmax = gpu_tile.add_values(
            math, softmax, weights, values.slots.at[slot], lambda: wait_for_keys(step + 1)
        )
        plgpu.barrier_arrive(values.consumed.at[slot])
        return softmax

    wait_for_keys(first)
    pl.when(warpgroup == 1)(take_turn)
    lax.fori_loop(first, tile_first, skip, None)
    softmax = lax.fori_loop(tile_first, tile_end, visit, gpu_tile.start_softmax(tile.shape[1]))
    lax.fori_loop(tile_end, end, skip, None)
    pl.when(warpgroup == 0)(give_turn)
    return softmax


def _clear(values, spans, barriers, step):
    """Zeroes the rows of a kv block that no span of the thread block holds; both warpgroups, half each."""
    num_chunks = values.shape[0] // TILE_ROWS
    warpgroup = lax.axis_index("warpgroup")
    covers = gpu_tile.covers(spans.lo, spans.hi, spans.block * _BLOCK_Q, _BLOCK_Q)

    for chunk in range(num_chunks):
        of_chunk = pl.ds(chunk * TILE_ROWS, TILE_ROWS)
        first_row = step * values.shape[0] + chunk * TILE_ROWS

        @pl.when(warpgroup == chunk % _COMPUTE_WARPGROUPS)
        def clear(of_chunk=of_chunk, first_row=first_row):
            gpu_tile.clear_unread_rows(values.at[of_chunk], first_row, covers)

    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.cleared)
    plgpu.barrier_wait(barriers.cleared)


def _stream(blocks, key, value, keys, values, first, end):
    """Copies kv blocks first .. end - 1 of key and value, refs [S, H], through the rings."""

    def copy(step, slot):
        rows = pl.ds((first + step) * blocks.block_kv, blocks.block_kv)
        for source, ring in ((key, keys), (value, values)):
            pl.when(step >= blocks.stages)(lambda ring=ring: plgpu.barrier_wait(ring.consumed.at[slot]))
            plgpu.copy_gmem_to_smem(source.at[rows], ring.slots.at[slot], ring.arrived.at[slot])

    lax.fori_loop(0, end - first, lambda step, _: copy(step, lax.rem(step, jnp.int32(blocks.stages))), None)
