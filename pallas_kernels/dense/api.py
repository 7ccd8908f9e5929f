"""When the kernel is the form to take; callers hold the XLA forms, which depend on how weights are kept."""

from __future__ import annotations

import jax

from pallas_kernels import native

# With more rows the products take longer than reading the matrix, and XLA's use AMX or VNNI.
MAX_ROWS = {"float32": 8, "bfloat16": 8, "int8": 4}


def takes(num_rows: int, matrix: jax.Array) -> bool:
    """True where the kernel runs here and is the fastest form for so many rows."""
    return num_rows <= MAX_ROWS.get(matrix.dtype.name, 0) and native.unavailable() is None
