"""What every checkpoint format looks like to model assembly: named tensors, read one at a time.

Names are Hugging Face names whatever the file format, for example
`model.layers.0.self_attn.q_proj.weight`; linear weights are [out, in].
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import ml_dtypes
import numpy as np

READ_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))

# Elements converted at a time: half a MiB as float32, which stays in a core's cache.
BLOCK_ELEMENTS = 1 << 17

# Blocks from which threads pay, and the most threads; numpy frees the interpreter lock in each block.
_THREADED_BLOCKS = 4
MAX_THREADS = 4


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is; the message is one line naming file and tensor."""


class TensorSource(Protocol):
    """Tensors of one checkpoint. Instances are safe to read from several threads.

    Attributes:
        description: the path, for error messages.
        norm_scales_include_one: True when norm scales are stored as the full multiplier although the
            model family defines them as 1 + w (GGUF files of Gemma); False when stored as the family
            defines them.
    """

    @property
    def description(self) -> str: ...

    @property
    def norm_scales_include_one(self) -> bool: ...

    def names(self) -> frozenset[str]:
        """Every tensor in the checkpoint; one that has no Hugging Face name has its raw name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. CheckpointError when there is none of that name."""
        ...

    def read(self, name: str, dtype: np.dtype | type, out: np.ndarray | None = None) -> np.ndarray:
        """That tensor in float32 or bfloat16, in `out` where given; the peak is the array and one block."""
        ...


def checked_dtype(call: str, dtype: np.dtype | type) -> np.dtype:
    """The numpy dtype, after refusing everything but float32 and bfloat16."""
    resolved = np.dtype(dtype)
    if resolved not in READ_DTYPES:
        raise ValueError(f"{call} takes dtype float32 or bfloat16; got {resolved}")
    return resolved


def read_by_row_blocks(
    shape: tuple[int, ...],
    dtype: np.dtype,
    rows_of: Callable[[int, int], np.ndarray],
    *,
    out: np.ndarray | None,
) -> np.ndarray:
    """An array [rows, columns] filled from `rows_of(start, end)`, block by block, on several threads.

    `rows_of` returns real rows [end - start, columns]; the cast to `dtype` rounds to nearest even. `out` is
    the array to fill, of any shape with as many elements; None: a new one.
    """
    rows, columns = shape
    if out is None:
        out = np.empty(shape, dtype)
    elif out.dtype != dtype or out.size != rows * columns or not out.flags.c_contiguous:
        raise ValueError(
            f"read(out=...) must be a C-contiguous {dtype} array of {rows * columns} elements; "
            f"got {out.dtype} {out.shape}"
        )
    out = out.reshape(shape)
    block_rows = max(1, BLOCK_ELEMENTS // columns)

    def fill(start: int) -> None:
        end = min(start + block_rows, rows)
        out[start:end] = rows_of(start, end)

    starts = range(0, rows, block_rows)
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    if len(starts) < _THREADED_BLOCKS or threads == 1:
        for start in starts:
            fill(start)
    else:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(fill, start) for start in starts]:
                done.result()
    return out
