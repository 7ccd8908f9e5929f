"""A matrix times a few rows in C++ (`native.cc`) for CPUs: optional, see `pallas_kernels.native`.

It reads the matrix once, at memory speed, and converts it in registers, which XLA's CPU compiler does not do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.dense.reference import dense_reference


@jax.custom_jvp
def dense_native(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns `rows @ matrix^T`, float32 [R, V], products and sums in float32.

    Under `vmap` the calls run one after another. Differentiable, through XLA's product.

    Args:
      rows: float32 [R, D].
      matrix: float32, bfloat16 or int8 [V, D]; int8 has no gradient.
    """
    shape = jax.ShapeDtypeStruct((rows.shape[0], matrix.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call(native.target(f"dense_{matrix.dtype.name}"), shape, vmap_method="sequential")
    return call(rows, matrix)


@dense_native.defjvp
def _dense_jvp(primals, tangents):
    (rows, matrix), (d_rows, d_matrix) = primals, tangents
    tangent = dense_reference(d_rows, matrix)
    if jnp.issubdtype(matrix.dtype, jnp.floating):
        tangent += dense_reference(rows, d_matrix)
    return dense_native(rows, matrix), tangent
