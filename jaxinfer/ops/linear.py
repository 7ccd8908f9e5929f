"""Linear maps: weights are `[out..., in]`; inputs take the weight's dtype, sums and results are float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pallas_kernels.compat import target_platform

# XLA's CPU matmul for bfloat16 is pathological with few rows (1 to 5 GFLOP/s for one row); with eight or
# more, and the weight as the left operand, it streams the weight at memory speed.
_MIN_BF16_ROWS = 8


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `x @ weight^T`, float32 `[..., *out]`.

    Args:
      x: `[..., D]`, any float dtype; cast to the weight's.
      weight: `[*out, D]`, float32 or bfloat16. float32 weights are multiplied in full float32 on every
        device.
    """
    out_shape = weight.shape[:-1]
    matrix = weight.reshape(-1, weight.shape[-1])
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    out = _few_rows(rows, matrix) if _is_few(rows, matrix) else _many_rows(rows, matrix)
    return out.reshape(*x.shape[:-1], *out_shape)


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


def embed(embedding: jax.Array, tokens: ArrayLike) -> jax.Array:
    """Returns the rows of `embedding` [V, D] at `tokens` int32 [B, T], float32 [B, T, D].

    Ids outside [0, V) read row 0; the caller marks their rows.
    """
    tokens = jnp.asarray(tokens)
    known = (tokens >= 0) & (tokens < embedding.shape[0])
    return embedding[jnp.where(known, tokens, 0)].astype(jnp.float32)
