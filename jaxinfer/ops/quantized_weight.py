"""Matrices stored as int8 with one scale for each output channel: half of bfloat16's bytes.

`W[..., i] = values[..., i] * scale[...]`, where a channel's scale is its greatest magnitude over 127. Only
the weights are quantised: activations, sums and key/value rows stay what they are in a bfloat16 model.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = 127
# Channels quantised at a time, so that what lies between the steps stays in the caches.
_BLOCK_VALUES = 1 << 18


@flax.struct.dataclass
class QuantizedWeight:
    """A linear weight `[*out, D]`, in place of an array of that shape.

    Attributes:
      values: int8 [*out, D], within -127..127.
      scale: float32 [*out].
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight it stands for."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """What inputs are cast to: bfloat16, which holds every value exactly."""
        return jnp.dtype(jnp.bfloat16)


# What every linear map takes.
Weight = jax.Array | QuantizedWeight


def is_quantized(weight: object) -> bool:
    """True for a `QuantizedWeight`: as `is_leaf`, it makes pytree functions see whole weights."""
    return isinstance(weight, QuantizedWeight)


def quantized_shape(*shape: int) -> QuantizedWeight:
    """Returns the stand-in of a quantised weight: its leaves are `jax.ShapeDtypeStruct`s."""
    values, scale = jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    return QuantizedWeight(values, scale)  # pyright: ignore[reportArgumentType]


def quantize_into(values: np.ndarray, scale: np.ndarray, weight: np.ndarray) -> None:
    """Fills `values` int8 [*out, D] and `scale` float32 [*out] from `weight` [*out, D], float32 or bfloat16.

    A channel of zeros has scale 0. One with an infinity or a NaN has that as its scale, so that what it
    gives is NaN.
    """
    width = weight.shape[-1]
    rows, out, scales = weight.reshape(-1, width), values.reshape(-1, width), scale.reshape(-1)
    block = max(1, _BLOCK_VALUES // width)
    for start in range(0, len(rows), block):
        part = rows[start : start + block].astype(np.float32)
        largest = np.maximum(part.max(axis=1), -part.min(axis=1))
        scales[start : start + block] = largest / _LARGEST
        with np.errstate(invalid="ignore", divide="ignore"):
            part *= np.where(largest > 0, _LARGEST / largest, 0)[:, None]
            np.rint(part, out=part)
            np.nan_to_num(part, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        out[start : start + block] = part


def quantize(weight: np.ndarray) -> QuantizedWeight:
    """Returns `weight` [*out, D], float32 or bfloat16, with int8 values."""
    values, scale = np.empty(weight.shape, np.int8), np.empty(weight.shape[:-1], np.float32)
    quantize_into(values, scale, weight)
    return QuantizedWeight(jnp.asarray(values), jnp.asarray(scale))
