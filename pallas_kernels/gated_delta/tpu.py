"""The gated delta rule for TPU (Pallas on Mosaic): chunks with the state held on chip, and a step.

Prefill's grid is batch row, group of value heads, chunk. A group's value heads share one key head, so their
keys and queries are read and multiplied once. The final state's block is the running state: it stays in VMEM
through a row's chunks. The algebra is that of `xla.py`; here the state after any column i of a chunk is

    S_i = e^(G_i) S + K^T (D_i * W)

so a checkpoint costs one more product in its own chunk and a copy to HBM, and nothing elsewhere.

Products of bfloat16 inputs take bfloat16 operands and float32 sums; decays, the triangular inverse and the
state are float32 whatever the inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta.reference import (
    NORM_EPS,
    checkpoints_before_scan,
    real_columns,
    scaled_queries,
    unit_rows,
)
from pallas_kernels.gated_delta.xla import (
    ZERO_LOG_DECAY,
    gated_delta_chunk_xla,
    gated_delta_step_xla,
)

LANES = 128
CHUNK = 64
MAX_HEAD_DIM = 256
_MAX_HEADS_A_CHUNK = 4  # value heads of one program of the prefill; their chains of products interleave
_STEP_STATE_BYTES = 1 << 20  # of state a program of the step reads, and writes
_MAX_STEP_STATE_BYTES = 3 << 20  # read and written, each in two buffers: 12 MiB


@dataclasses.dataclass(frozen=True)
class _Static:
    interpret: Any


class _ChunkInputs(NamedTuple):
    """Of the prefill's kernel: arrays, block specs or refs."""

    query: Any
    key: Any
    value: Any
    gates: Any  # log decays and betas, [B, nv, chunks, 2, C]
    initial: Any
    saved: Any  # the checkpoints' buffer, which the output of that name takes over


class _ChunkOutputs(NamedTuple):
    """Of the prefill's kernel: shapes, block specs or refs."""

    out: Any
    state: Any  # the running state; after a row's last chunk the final one
    saved: Any


def unsupported(key: jax.Array, value: jax.Array) -> str | None:
    """Returns why these kernels cannot take this key and value, [B, T, n, d] each; None where they can."""
    for name, x in (("key", key), ("value", value)):
        if x.shape[3] > MAX_HEAD_DIM or x.shape[3] % 8:
            return f"it takes {name} head dims that are multiples of 8 up to {MAX_HEAD_DIM}; got {x.shape[3]}"
    if value.shape[1] > 1:
        return None
    heads = _heads_a_step(value.shape[2], key.shape[3] * value.shape[3] * 4)
    if heads * key.shape[3] * value.shape[3] * 4 > _MAX_STEP_STATE_BYTES:
        return f"{value.shape[2]} value heads are not a multiple of 8, and too large to be read at once"
    return None


def gated_delta_chunk_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array,
    lengths: jax.Array | None,
    checkpoint_columns: jax.Array | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (output, final_state, checkpoint_states); see `gated_delta_chunk`.

    Gradients go through XLA's form. `interpret` runs the kernel anywhere: True, or a `pltpu.InterpretParams`.
    """
    arrays = (query, key, value, log_decay, beta, initial_state)
    return _chunks(_Static(interpret), *arrays, lengths, checkpoint_columns)


def gated_delta_step_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array,
    lengths: jax.Array | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (output, state) after one column; see `gated_delta_step`. Gradients go through XLA's form."""
    return _step(_Static(interpret), query, key, value, log_decay, beta, initial_state, lengths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(static, query, key, value, log_decay, beta, initial_state, lengths, checkpoint_columns):
    batch, q_len = value.shape[:2]
    if lengths is None:
        lengths = jnp.full((batch,), q_len, jnp.int32)
    lengths = jnp.clip(lengths, 0, q_len)
    if checkpoint_columns is None:
        columns, before = jnp.full((batch, 1), -1, jnp.int32), None
        saved = jnp.zeros((batch, 1, *initial_state.shape[1:]), jnp.float32)
    else:
        # Columns past a row's length hold what its last one does; those that do not exist are in no chunk.
        exists = (checkpoint_columns >= 1) & (checkpoint_columns <= q_len)
        columns = jnp.where(exists, jnp.minimum(checkpoint_columns, lengths[:, None]), checkpoint_columns)
        before = checkpoints_before_scan(initial_state, columns, q_len)
        columns = jnp.where(exists, columns, -1)
        saved = before
    out, state, saved = _run_chunks(
        static, query, key, value, log_decay, beta, initial_state, lengths, columns, saved
    )
    return out, state, None if before is None else saved


def _run_chunks(static, query, key, value, log_decay, beta, initial_state, lengths, columns, saved):
    batch, q_len, num_value_heads, value_dim = value.shape
    num_key_heads, key_dim = key.shape[2:]
    groups = num_value_heads // num_key_heads
    heads = max(n for n in range(1, _MAX_HEADS_A_CHUNK + 1) if groups % n == 0)
    num_chunks = pl.cdiv(q_len, CHUNK)
    gates = jnp.stack([log_decay, beta.astype(jnp.float32)], axis=1)  # [B, 2, T, nv]
    gates = jnp.pad(gates, ((0, 0), (0, 0), (0, num_chunks * CHUNK - q_len), (0, 0)))
    gates = gates.reshape(batch, 2, num_chunks, CHUNK, num_value_heads).transpose(0, 4, 2, 1, 3)

    def real_chunk(b, c, padding):
        """The chunk, or past the row's length its last one: the same block again moves nothing."""
        return jnp.minimum(c, jnp.maximum(q_len - padding[b] - 1, 0) // CHUNK)

    def key_index(b, h, c, padding, columns):
        return b, real_chunk(b, c, padding), h * heads // groups

    def value_index(b, h, c, padding, columns):
        return b, real_chunk(b, c, padding), h

    def out_index(b, h, c, padding, columns):
        return b, c, h

    def gates_index(b, h, c, padding, columns):
        return b, h, real_chunk(b, c, padding), 0, 0

    def state_index(b, h, c, padding, columns):
        return b, h, 0, 0

    state_spec = pl.BlockSpec((None, heads, key_dim, value_dim), state_index)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out_shape, out_spec = _heads_spec(value.shape, heads, out_index)
    [outputs] = pl.pallas_call(
        functools.partial(_chunk_kernel, q_len=q_len, operand_dtype=_operand_dtype(query, key, value)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, num_value_heads // heads, num_chunks),
            in_specs=[
                _ChunkInputs(
                    query=_heads_spec(query.shape, 1, key_index)[1],
                    key=_heads_spec(key.shape, 1, key_index)[1],
                    value=_heads_spec(value.shape, heads, value_index)[1],
                    gates=pl.BlockSpec((None, heads, None, 2, CHUNK), gates_index),
                    initial=state_spec,
                    saved=anywhere,
                )
            ],
            out_specs=[_ChunkOutputs(out_spec, state_spec, anywhere)],
            scratch_shapes=[pltpu.VMEM((key_dim, value_dim), jnp.float32)],
        ),
        out_shape=[
            _ChunkOutputs(
                out=jax.ShapeDtypeStruct(out_shape, value.dtype),
                state=jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
                saved=jax.ShapeDtypeStruct(saved.shape, jnp.float32),
            )
        ],
        input_output_aliases={7: 2},  # `saved`, counted with the two prefetched scalars
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=static.interpret,
        name="gated_delta_chunk",
    )(
        q_len - lengths,
        columns,
        _ChunkInputs(_by_heads(query), _by_heads(key), _by_heads(value), gates, initial_state, saved),
    )
    out = outputs.out.transpose(0, 2, 1, 3) if len(out_shape) == 4 else outputs.out.reshape(value.shape)
    return out, outputs.state, outputs.saved


def _by_heads(x):
    """[B, T, n, d] with heads side by side where they are whole lane groups (moves nothing), else first."""
    if x.shape[3] % LANES == 0:
        return x.reshape(*x.shape[:2], -1)
    return x.transpose(0, 2, 1, 3)


def _heads_spec(shape, heads, index):
    """(shape, block spec) of `_by_heads`, `heads` heads a block; `index` gives (row, chunk, heads' block)."""
    batch, q_len, num_heads, dim = shape
    if dim % LANES == 0:
        return (batch, q_len, num_heads * dim), pl.BlockSpec((None, CHUNK, heads * dim), index)

    def heads_first(*ids):
        row, chunk, head = index(*ids)
        return row, head, chunk, 0

    return (batch, num_heads, q_len, dim), pl.BlockSpec((None, heads, CHUNK, dim), heads_first)


def _operand_dtype(*arrays):
    return jnp.bfloat16 if all(x.dtype == jnp.bfloat16 for x in arrays) else jnp.float32


def _chunk_kernel(padding, columns, inputs, outputs, staging, *, q_len, operand_dtype):
    """One chunk of one group of value heads.

    Padding is counted, not columns: static profiles read prefetched scalars as zero, here the most work.
    """
    row, group, chunk = (pl.program_id(i) for i in range(3))
    out, state = outputs.out, outputs.state
    count = q_len - padding[row] - chunk * CHUNK  # real columns, from this chunk's first on
    heads = state.shape[0]
    product = functools.partial(_product, dtype=operand_dtype)

    @pl.when(chunk == 0)
    def start():
        state[...] = inputs.initial[...]

    @pl.when(count <= 0)
    def only_padding():
        out[...] = jnp.zeros_like(out)

    @pl.when(count > 0)
    def real():
        keys = _unit(_real_rows(_head(inputs.key, 0, 1), count))
        queries = _unit(_real_rows(_head(inputs.query, 0, 1), count)) * keys.shape[1] ** -0.5
        both = jnp.concatenate([keys, queries])
        products = product(both, keys, contract=(1, 1))
        for head in range(heads):
            log_decay, beta = _real_gates(inputs.gates, head, count)
            decay, from_start = _decays(log_decay)
            before = state[head]
            reads = product(both, before)
            residual = _real_rows(_head(inputs.value, head, heads), count) - from_start * reads[:CHUNK]
            below = _row_ids() > _lane_ids()
            system = jnp.where(below, beta * products[:CHUNK] * decay, 0)
            written = product(_unit_lower_inverse(system), beta * residual)
            read = from_start * reads[CHUNK:] + product(products[CHUNK:] * decay, written)
            _set_head(out, head, heads, read)

            def state_after(column, log_decay=log_decay, before=before, written=written):
                kept, weights = _decays_upto(log_decay, column)
                return kept * before + product(keys, weights * written, contract=(0, 0))

            state[head] = state_after(CHUNK - 1)
            for slot in range(columns.shape[1]):
                column = columns[row, slot] - 1 - chunk * CHUNK

                @pl.when((column >= 0) & (column < CHUNK))
                def save(slot=slot, column=column, head=head, state_after=state_after):
                    staging[...] = state_after(column)
                    pltpu.sync_copy(staging, outputs.saved.at[row, slot, group * heads + head])


def _head(ref, head, heads):
    """One head's columns [C, d] of a block of `_heads_spec`, float32."""
    if len(ref.shape) == 3:
        return ref[head].astype(jnp.float32)
    dim = ref.shape[1] // heads
    return ref[:, head * dim : (head + 1) * dim].astype(jnp.float32)


def _set_head(ref, head, heads, x):
    if len(ref.shape) == 3:
        ref[head] = x.astype(ref.dtype)
    else:
        dim = ref.shape[1] // heads
        ref[:, head * dim : (head + 1) * dim] = x.astype(ref.dtype)


def _row_ids(shape=(CHUNK, CHUNK)):
    return lax.broadcasted_iota(jnp.int32, shape, 0)


def _lane_ids(shape=(CHUNK, CHUNK)):
    return lax.broadcasted_iota(jnp.int32, shape, 1)


def _real_rows(x, count):
    return jnp.where(_row_ids(x.shape) < count, x, 0)


def _unit(x):
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPS)


def _real_gates(gates, head, count):
    """(log decays, every row the same [C, C]; betas as a column [C, 1]), padding's 0."""
    rows = [jnp.broadcast_to(gates[head, i : i + 1, :], (CHUNK, CHUNK)) for i in range(2)]
    log_decay, beta = (jnp.where(_lane_ids() < count, x, 0) for x in rows)
    beta = jnp.sum(jnp.where(_row_ids() == _lane_ids(), beta, 0), axis=1, keepdims=True)
    return jnp.maximum(log_decay, ZERO_LOG_DECAY), beta


def _decays(log_decay):
    """(D [C, C], e^G [C, 1]): every exponent is a sum of its own columns' log decays."""
    upto = jnp.where(_lane_ids() <= _row_ids(), log_decay, 0)
    below = (_row_ids() > _lane_ids()).astype(jnp.float32)
    decay = jnp.where(_lane_ids() <= _row_ids(), jnp.exp(_product(upto, below)), 0)
    return decay, jnp.exp(jnp.sum(upto, axis=1, keepdims=True))


def _decays_upto(log_decay, column):
    """(e^(G_i) [1, 1], row i of D as a column [C, 1]) for i = `column`, 0 past it."""
    upto = jnp.where(_lane_ids() <= column, log_decay, 0)
    kept = jnp.exp(jnp.sum(upto[:1], axis=1, keepdims=True))
    after = jnp.sum(jnp.where(_lane_ids() > _row_ids(), upto, 0), axis=1, keepdims=True)
    return kept, jnp.where(_row_ids((CHUNK, 1)) <= column, jnp.exp(after), 0)


def _unit_lower_inverse(lower):
    """(I + lower)^-1 of strictly lower triangular [C, C].

    X holds the inverses of the blocks on the diagonal; the corners between pairs of blocks join them into
    blocks twice the size, all pairs in the same two products: X - X (lower, these corners only) X.
    """
    rows, lanes = _row_ids(), _lane_ids()

    def corners(block):
        pair, second = rows // (2 * block) == lanes // (2 * block), rows // block > lanes // block
        return jnp.where(pair & second, lower, 0)

    inverse = jnp.where(rows == lanes, 1.0, 0.0) - corners(1)
    block = 2
    while block < CHUNK:
        inverse = inverse - _product(_product(inverse, corners(block)), inverse)
        block *= 2
    return inverse


def _product(left, right, *, contract=(1, 0), dtype=jnp.float32):
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _heads_a_step(num_value_heads, state_bytes):
    """Value heads of one program of the step: a multiple of 8, or all of them."""
    fitting = [
        n
        for n in range(8, num_value_heads, 8)
        if num_value_heads % n == 0 and n * state_bytes <= _STEP_STATE_BYTES
    ]
    if fitting:
        return max(fitting)
    if num_value_heads % 8 or num_value_heads * state_bytes <= _STEP_STATE_BYTES:
        return num_value_heads
    return 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step(static, query, key, value, log_decay, beta, initial_state, lengths):
    groups = value.shape[2] // key.shape[2]
    columns = real_columns(query, key, value, log_decay, beta, lengths)
    query, key, value, log_decay, beta = (x[:, 0].astype(jnp.float32) for x in columns)
    query, key = (jnp.repeat(x, groups, axis=1) for x in (scaled_queries(query), unit_rows(key)))
    overlap = jnp.sum(key * query, axis=-1)
    gates = jnp.stack([jnp.exp(log_decay), beta, overlap], axis=-1)  # [B, nv, 3]
    batch, num_value_heads, key_dim, value_dim = initial_state.shape
    heads = _heads_a_step(num_value_heads, key_dim * value_dim * 4)

    def rows(width):
        return pl.BlockSpec((None, heads, width), lambda b, h: (b, h, 0))

    state_spec = pl.BlockSpec((None, heads, key_dim, value_dim), lambda b, h: (b, h, 0, 0))
    out, state = pl.pallas_call(
        _step_kernel,
        grid=(batch, num_value_heads // heads),
        in_specs=[rows(key_dim), rows(key_dim), rows(value_dim), rows(gates.shape[2]), state_spec],
        out_specs=[rows(value_dim), state_spec],
        out_shape=[
            jax.ShapeDtypeStruct(value.shape, jnp.float32),
            jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
        ],
        input_output_aliases={4: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=static.interpret,
        name="gated_delta_step",
    )(query, key, value, gates, initial_state)
    return out[:, None].astype(columns[2].dtype), state


def _step_kernel(query, key, value, gates, before, out, after):
    """One column of some heads: one pass over each head's state reads it for both products and rewrites it.

    The updated state's readout comes from the old one: S'^T q = e^g S^T q + <k, q> w.
    """
    keys, queries = key[...].T, query[...].T  # [dk, heads]
    for head in range(before.shape[0]):
        k, q = keys[:, head : head + 1], queries[:, head : head + 1]
        decay, beta, overlap = (gates[head : head + 1, i : i + 1] for i in range(3))
        state = before[head]
        read = decay * jnp.sum(k * state, axis=0, keepdims=True)
        written = beta * (value[head : head + 1] - read)
        out[head : head + 1] = decay * jnp.sum(q * state, axis=0, keepdims=True) + overlap * written
        after[head] = decay * state + k * written


def _chunks_fwd(static, *arrays):
    return _chunks(static, *arrays), arrays


def _chunks_bwd(static, arrays, cotangents):
    *floats, lengths, checkpoint_columns = arrays

    def xla(*floats):
        *columns, state = floats
        return gated_delta_chunk_xla(
            *columns, initial_state=state, lengths=lengths, checkpoint_columns=checkpoint_columns
        )

    return *jax.vjp(xla, *floats)[1](cotangents), None, None


def _step_fwd(static, *arrays):
    return _step(static, *arrays), arrays


def _step_bwd(static, arrays, cotangents):
    *floats, lengths = arrays

    def xla(*floats):
        *columns, state = floats
        return gated_delta_step_xla(*columns, initial_state=state, lengths=lengths)

    return *jax.vjp(xla, *floats)[1](cotangents), None


_chunks.defvjp(_chunks_fwd, _chunks_bwd)
_step.defvjp(_step_fwd, _step_bwd)
