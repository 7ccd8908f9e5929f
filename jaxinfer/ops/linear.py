"""Linear maps: weights are `[out..., in]`; inputs take the weight's dtype, sums and results are float32.

A weight may be a `QuantizedWeight`: int8 values times a float32 scale for each output channel. With many rows
its values are multiplied as bfloat16, which holds them exactly, and the scale goes onto the result.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxinfer.ops.quantized_weight import QuantizedWeight, Weight
from pallas_kernels.compat import target_platform
from pallas_kernels.dense import dense_native, takes

# XLA's CPU matmul for bfloat16 is pathological with few rows (1 to 5 GFLOP/s for one row); with eight or
# more, and the weight as the left operand, it streams the weight at memory speed.
_MIN_BF16_ROWS = 8
# Rows up to which the int8 product of their two halves is faster than converting the weight.
_MAX_SPLIT_ROWS = 32
# An input's two int8 halves: x = step * (high + low / 254), within 1/254 of half a step.
_LOW_STEPS = 254


def linear(x: jax.Array, weight: Weight) -> jax.Array:
    """Returns `x @ weight^T`, float32 `[..., *out]`.

    Args:
      x: `[..., D]`, any float dtype; cast to the weight's.
      weight: `[*out, D]`, float32, bfloat16 or quantised. float32 weights are multiplied in full float32 on
        every device. A quantised one has no gradient; on a CPU a few rows of x go in as 16-bit fixed point,
        within 2^-16 of the row's greatest magnitude.
    """
    if isinstance(weight, QuantizedWeight):
        return _quantized_linear(x, weight)
    out_shape = weight.shape[:-1]
    matrix = weight.reshape(-1, weight.shape[-1])
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    if takes(rows.shape[0], matrix):
        out = dense_native(rows.astype(jnp.float32), matrix)
    else:
        out = _few_rows(rows, matrix) if _is_few(rows, matrix) else _many_rows(rows, matrix)
    return out.reshape(*x.shape[:-1], *out_shape)


def _quantized_linear(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    matrix = weight.values.reshape(-1, weight.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    if takes(rows.shape[0], matrix):
        product = dense_native
    else:
        few = rows.shape[0] <= _MAX_SPLIT_ROWS and target_platform() == "cpu"
        product = _few_rows_int8 if few else _many_rows_int8
    out = product(rows.astype(jnp.float32), matrix)
    out = out.reshape(*x.shape[:-1], *weight.shape[:-1])
    return out * weight.scale


def _many_rows_int8(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    # Tied to the rows, or a loop around the call keeps a bfloat16 copy of every matrix.
    _, matrix = lax.optimization_barrier((lax.stop_gradient(rows), matrix))
    return _many_rows(rows.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16))


@jax.custom_jvp
def _few_rows_int8(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns `rows @ matrix^T` float32 for float32 `rows` [R, D] and int8 `matrix` [V, D].

    XLA's CPU compiler converts int8 to floats far slower than memory gives them, but multiplies int8 by
    int8 at memory speed, and more rows of the small operand are nearly free. So each row goes in twice: as
    int8, and as int8 of what rounding it left.
    """
    num_rows = rows.shape[0]
    step = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / 127
    scaled = jnp.where(step > 0, rows / step, 0)
    high = jnp.round(scaled)
    low = jnp.round((scaled - high) * _LOW_STEPS)
    halves = jnp.concatenate([high, low]).astype(jnp.int8)
    padded = jnp.pad(halves, ((0, -2 * num_rows % _MIN_BF16_ROWS), (0, 0)))
    out = lax.dot_general(matrix, padded, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    out = lax.optimization_barrier(out).astype(jnp.float32).T
    # A row with an infinity or a NaN has that as its step, and its result is NaN.
    return (out[:num_rows] + out[num_rows : 2 * num_rows] / _LOW_STEPS) * step


@_few_rows_int8.defjvp
def _few_rows_int8_jvp(primals, tangents):
    rows, matrix = primals
    tangent = _many_rows(tangents[0].astype(jnp.bfloat16), matrix.astype(jnp.bfloat16))
    return _few_rows_int8(rows, matrix), tangent


def _is_few(rows: jax.Array, matrix: jax.Array) -> bool:
    few = rows.shape[0] <= _MIN_BF16_ROWS
    return few and matrix.dtype == jnp.bfloat16 and target_platform() == "cpu"


def _many_rows(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    return lax.dot_general(
        rows,
        matrix,
        (((1,), (1,)), ((), ())),
        precision=_precision(matrix),
        preferred_element_type=jnp.float32,
    )


def _few_rows(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    num_rows = rows.shape[0]
    padded = jnp.pad(rows, ((0, _MIN_BF16_ROWS - num_rows), (0, 0)))
    out = lax.dot_general(matrix, padded, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # Without the barrier the transpose is folded into the product, which puts the weight on the right again.
    return lax.optimization_barrier(out)[:, :num_rows].T


def _precision(matrix: jax.Array) -> lax.Precision | None:
    # Without it a TPU multiplies float32 in one bfloat16 pass.
    return lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else None


def embed(embedding: Weight, tokens: ArrayLike) -> jax.Array:
    """Returns the rows of `embedding` [V, D] at `tokens` int32 [B, T], float32 [B, T, D].

    Ids outside [0, V) read row 0; the caller marks their rows.
    """
    tokens = jnp.asarray(tokens)
    known = (tokens >= 0) & (tokens < embedding.shape[0])
    rows = jnp.where(known, tokens, 0)
    if isinstance(embedding, QuantizedWeight):
        return embedding.values[rows].astype(jnp.float32) * embedding.scale[rows][..., None]
    return embedding[rows].astype(jnp.float32)
