"""Span attention for TPU: how calls are laid out for the kernel, and what it cannot take.

Prefill gives the kernel one query head at a time. Decode packs the queries of all heads that read one
key head into the rows of a tile, so that keys and values are fetched once; its work is the key blocks.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.compat import pallas_tpu_refusal
from pallas_kernels.span_attention.blocks import canonical_spans
from pallas_kernels.span_attention.tpu_schedule import make_schedule, max_steps, too_large
from pallas_kernels.span_attention.xla import pull_back

LANES = 128
MAX_HEAD_DIM = 256
# Up to here the query rows of one key head make one tile: more would leave registers too few.
MAX_PACKED_ROWS = 256
_ROW_MULTIPLE = 16  # sublanes that a bfloat16 register packs


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Query rows and key rows a grid step; block_kv is a multiple of 128, block_q of 16."""

    block_q: int = 256
    block_kv: int = 512

    def __post_init__(self):
        if self.block_q < 1 or self.block_q % _ROW_MULTIPLE or self.block_kv < 1 or self.block_kv % LANES:
            raise ValueError(
                f"BlockSizes(block_q=..., block_kv=...) must be multiples of {_ROW_MULTIPLE} and {LANES}; "
                f"got {self.block_q} and {self.block_kv}"
            )


PREFILL_BLOCKS = BlockSizes(256, 512)
DECODE_BLOCK_KV = 2048


def unsupported(query: jax.Array, key: jax.Array) -> str | None:
    """Returns why the kernel cannot take query [B, T, N, H] and key [B, K, S, H], None where it can."""
    if refusal := pallas_tpu_refusal():
        return refusal
    if query.shape[3] > MAX_HEAD_DIM:
        return f"it takes a head_dim of at most {MAX_HEAD_DIM}; got {query.shape[3]}"
    if 0 in query.shape or 0 in key.shape:
        return None
    layout = _layout(query, key, None)
    tiles = query.shape[0] * layout.tiles_per_row
    blocks = -(-key.shape[2] // layout.block_kv)
    return too_large(tiles, query.shape[0], tiles * blocks)


def packs_rows(query: jax.Array, key: jax.Array) -> bool:
    """Returns whether the query heads of a key head share a tile: decode."""
    rows = query.shape[1] * query.shape[2] // key.shape[1]
    return query.shape[1] < LANES and rows <= MAX_PACKED_ROWS


@dataclasses.dataclass(frozen=True)
class _Static:
    softmax_scale: float
    logits_soft_cap: float | None
    blocks: BlockSizes | None
    interpret: object


@dataclasses.dataclass(frozen=True)
class _Layout:
    packed: bool
    block_q: int
    block_kv: int
    tiles_per_row: int


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
    interpret: object = False,
) -> jax.Array:
    """Returns what `span_attention_reference` means, [B, T, N, H]; gradients go through the XLA form.

    Arguments are the reference's. `blocks` overrides the block sizes; `interpret` runs the kernel
    anywhere (True, or a `pltpu.InterpretParams`).
    """
    static = _Static(softmax_scale, logits_soft_cap, blocks, interpret)
    return _attend(static, query, key, value, span_lo, span_hi, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, span_lo, span_hi, sinks):
    return _forward(static, query, key, value, span_lo, span_hi, sinks)


def _attend_fwd(static, *arrays):
    return _forward(static, *arrays), arrays


def _attend_bwd(static, arrays, d_out):
    return pull_back(arrays, d_out, static.softmax_scale, static.logits_soft_cap)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _layout(query, key, blocks: BlockSizes | None) -> _Layout:
    q_len, kv_len = query.shape[1], key.shape[2]
    if packs_rows(query, key):
        block_q = _round_up(q_len * query.shape[2] // key.shape[1], _ROW_MULTIPLE)
        block_kv = blocks.block_kv if blocks else DECODE_BLOCK_KV
        return _Layout(True, block_q, min(block_kv, _round_up(kv_len, LANES)), 1)
    blocks = blocks or PREFILL_BLOCKS
    block_q = min(blocks.block_q, _round_up(q_len, LANES))
    block_kv = min(blocks.block_kv, _round_up(kv_len, LANES))
    return _Layout(False, block_q, block_kv, -(-q_len // block_q))


def _forward(static, query, key, value, span_lo, span_hi, sinks):
    from pallas_kernels.span_attention.tpu_kernel import Operands, Program, attend_tiles

    groups, kv_len = query.shape[2] // key.shape[1], key.shape[2]
    layout = _layout(query, key, static.blocks)
    lo, hi = canonical_spans(span_lo, span_hi, kv_len)
    rows = query.transpose(0, 2, 1, 3)
    if layout.packed:
        rows = pack_rows(query, key.shape[1], layout.block_q)
        lo, hi = jnp.repeat(lo, groups, axis=1), jnp.repeat(hi, groups, axis=1)
    lo = tile_rows(lo, layout.block_q, fill=kv_len)
    hi = tile_rows(hi, layout.block_q, fill=-1)
    steps = max_steps(lo.shape[0], 1, -(-kv_len // layout.block_kv), lo.shape[0])
    schedule = make_schedule(
        lo[:, None],
        hi[:, None],
        kv_len=kv_len,
        block_kv=layout.block_kv,
        limit=steps,
        tiles_per_row=layout.tiles_per_row,
    )
    program = Program(
        softmax_scale=static.softmax_scale,
        logits_soft_cap=static.logits_soft_cap,
        block_q=layout.block_q,
        block_kv=layout.block_kv,
        groups=1 if layout.packed else groups,
        interpret=static.interpret,
    )
    if sinks is not None:
        sinks = sink_rows(sinks, layout.block_q, groups if layout.packed else 1)
    out = attend_tiles(program, Operands(rows, key, value, lo, hi, None, None, sinks), schedule)
    return unpack_rows(out, query.shape) if layout.packed else out.transpose(0, 2, 1, 3)


# Layouts


def pack_rows(query: jax.Array, num_kv_heads: int, multiple: int) -> jax.Array:
    """Returns query [B, T, N, H] as rows (t, g) of each key head, [B, K, R, H], zeros up to a multiple."""
    batch, q_len, num_q_heads, head_dim = query.shape
    grouped = query.reshape(batch, q_len, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    rows = grouped.transpose(0, 2, 1, 3, 4).reshape(batch, num_kv_heads, -1, head_dim)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % multiple), (0, 0)))


def unpack_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns [B, T, N, H] = `shape` of what `pack_rows` laid out."""
    batch, q_len, num_q_heads, head_dim = shape
    num_kv_heads = rows.shape[1]
    groups = num_q_heads // num_kv_heads
    grouped = rows[:, :, : q_len * groups].reshape(batch, num_kv_heads, q_len, groups, head_dim)
    return grouped.transpose(0, 2, 1, 3, 4).reshape(shape)


def tile_rows(x: jax.Array, block_q: int, *, fill: int) -> jax.Array:
    """Returns int32 [rows, queries] as [tiles, block_q], each row filled up to whole tiles."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block_q)), constant_values=fill)
    return padded.reshape(-1, block_q)


def sink_rows(sinks: jax.Array, block_q: int, groups: int) -> jax.Array:
    """Returns sinks [N] for the rows of a tile, float32 [heads, block_q]; `groups` heads share a tile."""
    by_tile = sinks.astype(jnp.float32).reshape(-1, groups)
    return jnp.tile(by_tile, (1, -(-block_q // groups)))[:, :block_q]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
