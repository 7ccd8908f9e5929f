"""Stored GGUF rows to float32.

The common block types are expanded here, a whole tile of blocks in each numpy call; the `gguf` library
gives the same values for these and all others, in groups of 16 rows, five to ten times slower. The
layouts are those of ggml-quants.h in the ggml project; products and sums keep its order, so values are
equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_LOW_PAIRS = np.uint64(0x0303030303030303)


def dequantize_rows(stored: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """uint8 [rows, bytes a row] of one tensor type -> real [rows, elements], a view where nothing is packed.

    Raises:
        NotImplementedError: a tensor type that cannot be expanded.
    """
    if kind in _PLAIN:
        return np.ascontiguousarray(stored).view(_PLAIN[kind])
    expand = _EXPAND.get(kind)
    if expand is None:
        return gguf.dequantize(stored, kind)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = stored.reshape(-1, block_bytes)
    out = np.empty((len(blocks), block_size), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite scales give what the library gives
        expand(blocks, out)
    return out.reshape(len(stored), -1)


def _halves(blocks: np.ndarray, column: int) -> np.ndarray:
    """The float16 at a byte column of each block, float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, column : column + 2]).view(np.float16).astype(np.float32)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, 32 int8: d * q."""
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _halves(blocks, 0)


def _nibbles(packed: np.ndarray, group: int) -> np.ndarray:
    """Bytes [blocks, n] -> uint8 [blocks, 2 n]: of each group of bytes the low nibbles, then the high.

    Works on eight bytes at a time: a shift by four carries into the neighbour's high nibble only, which
    the mask clears.
    """
    words = np.ascontiguousarray(packed).view(np.uint64).reshape(len(packed), -1, 1, group // 8)
    out = np.empty((*words.shape[:2], 2, group // 8), np.uint64)
    np.bitwise_and(words, _LOW_NIBBLES, out=out[:, :, :1])
    np.right_shift(words, 4, out=out[:, :, 1:])
    out[:, :, 1:] &= _LOW_NIBBLES
    return out.view(np.uint8).reshape(len(packed), -1)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, 16 bytes of nibbles: d * (q - 8)."""
    quants = _nibbles(blocks[:, 2:], 16)
    quants -= 8  # wraps to what int8 reads as negative
    out[:] = quants.view(np.int8)
    out *= _halves(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, m, 16 bytes of nibbles: d * q + m."""
    out[:] = _nibbles(blocks[:, 4:], 16)
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _five_bits(high: np.ndarray, packed: np.ndarray) -> np.ndarray:
    """Nibbles with bit 4 of element j in bit j of the four bytes `high`; uint8 [blocks, 32]."""
    top = np.unpackbits(high, axis=1, bitorder="little").view(np.uint64)
    top <<= 4
    top |= _nibbles(packed, 16).view(np.uint64)
    return top.view(np.uint8)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, 4 bytes of high bits, 16 bytes of nibbles: d * (q - 16)."""
    quants = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    quants -= 16  # wraps to what int8 reads as negative
    out[:] = quants.view(np.int8)
    out *= _halves(blocks, 0)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, m, 4 bytes of high bits, 16 bytes of nibbles: d * q + m."""
    out[:] = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, dmin, 12 bytes of 6-bit scales and mins of 8 groups, 128 bytes: d * scale * q - dmin * min."""
    out[:] = _nibbles(blocks[:, 16:], 32)
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1).astype(np.float32)
    mins = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=1).astype(np.float32)
    by_group = out.reshape(-1, 8, 32)
    by_group *= (scales * _halves(blocks, 0))[:, :, None]
    by_group -= (mins * _halves(blocks, 2))[:, :, None]


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """128 bytes of nibbles, 64 of high bit pairs, 16 int8 scales of 16, d: d * scale * (q - 32)."""
    quants = _nibbles(blocks[:, :128], 64).view(np.uint64).reshape(-1, 2, 4, 4)
    pairs = np.ascontiguousarray(blocks[:, 128:192]).view(np.uint64).reshape(-1, 2, 4)
    for quarter in range(4):
        quants[:, :, quarter] |= ((pairs >> (2 * quarter)) & _LOW_PAIRS) << 4
    out[:] = (quants.view(np.uint8).reshape(out.shape) - 32).view(np.int8)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    by_group = out.reshape(-1, 16, 16)
    by_group *= scales[:, :, None]


_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_EXPAND: dict[GGMLQuantizationType, Callable[[np.ndarray, np.ndarray], None]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
