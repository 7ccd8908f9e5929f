"""Attention of every column to every other, for the patches of one image.

In XLA's form for CPUs a block of many queries against all keys is two large products with one pass of
exponentials between them. Where span attention has a faster kernel, the kernel does it: on other devices, and
on a CPU for bfloat16 where the native one is compiled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.ops.attention import attention_implementations, span_attention
from pallas_kernels.compat import target_platform

_BLOCK_SCORES = 1 << 22  # of one head at a time, 16 MiB
_LANES = 16
_FLOOR = -1e30


def full_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    length: jax.Array | None = None,
    *,
    softmax_scale: float,
) -> jax.Array:
    """Returns `softmax(scale * query key^T) value` a head, [T, N, H] in `query`'s dtype.

    Args:
      query, key, value: [T, N, H] of one dtype.
      length: int32, at least 1: only the first `length` columns are read; None: all. What later columns give
        means nothing.
    """
    has_native = attention_implementations()["native"] is None  # no reason why not
    if target_platform() != "cpu" or (has_native and query.dtype == jnp.bfloat16):
        columns = query.shape[0]
        last = columns - 1 if length is None else length - 1
        return span_attention(
            query[None],
            jnp.swapaxes(key, 0, 1)[None],
            jnp.swapaxes(value, 0, 1)[None],
            jnp.zeros((1, columns), jnp.int32),
            jnp.full((1, columns), last, jnp.int32),
            softmax_scale=softmax_scale,
        )[0]
    return _by_head(query, key, value, length, softmax_scale)


def _by_head(
    query: jax.Array, key: jax.Array, value: jax.Array, length: jax.Array | None, softmax_scale: float
) -> jax.Array:
    columns, heads, head_dim = query.shape
    block = columns // _num_blocks(columns)
    blocks = jnp.swapaxes(query, 0, 1).reshape(heads, -1, block, head_dim)
    # A channel of ones makes the second product sum the weights too.
    ones = jnp.ones((heads, 1, columns), value.dtype)
    value = jnp.concatenate([value.transpose(1, 2, 0), ones], axis=1)
    value = jnp.pad(value, ((0, 0), (0, -(head_dim + 1) % _LANES), (0, 0)))
    is_read = None if length is None else jnp.arange(columns) < length

    def one_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, keys, values = head  # [blocks, block, H], [T, H], [H + 1 and padding, T]

        def one_block(rows: jax.Array) -> jax.Array:
            scores = _product(rows, keys)
            if is_read is not None:
                scores = jnp.where(is_read, scores, _FLOOR)
            top = jnp.max(scores, axis=1, keepdims=True)
            weights = jnp.exp((scores - top) * softmax_scale).astype(values.dtype)
            out = _product(weights, values)
            return (out[:, :head_dim] / out[:, head_dim : head_dim + 1]).astype(rows.dtype)

        return lax.map(one_block, queries)

    out = lax.map(one_head, (blocks, jnp.swapaxes(key, 0, 1), value))  # [N, blocks, block, H]
    return out.reshape(heads, columns, head_dim).swapaxes(0, 1)


def _num_blocks(columns: int) -> int:
    """Returns the fewest equal blocks of queries whose scores are few enough."""
    count = -(-columns * columns // _BLOCK_SCORES)
    while columns % count:
        count += 1
    return count


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a b^T` in float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
