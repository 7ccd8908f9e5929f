"""Stored GGUF rows to real numbers."""

from __future__ import annotations

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType


def dequantize_rows(stored: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """uint8 [rows, bytes a row] of one tensor type -> real [rows, elements].

    Raises:
        NotImplementedError: a tensor type that the `gguf` library cannot expand.
    """
    if kind == GGMLQuantizationType.F32:
        return stored.view(np.float32)
    if kind == GGMLQuantizationType.F16:
        return stored.view(np.float16)
    return gguf.dequantize(stored, kind)
