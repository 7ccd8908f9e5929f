"""Rotary position embedding (Su et al., 2021), half-split: dim i is paired with dim i + rotary_dim / 2."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Returns radians a position, float64 [rotary_dim / 2], after the config's scaling rule."""
    freqs = rope.theta ** (-np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    if rope.scaling == "linear":
        return freqs / rope.factor
    if rope.scaling == "llama3":
        return _llama3_frequencies(freqs, rope)
    return freqs


def _llama3_frequencies(freqs: np.ndarray, rope: RopeConfig) -> np.ndarray:
    # Long wavelengths are slowed by `factor`, short ones kept, those between blended by how often they
    # turn within the original context.
    turns = rope.original_max_positions * freqs / (2 * np.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * freqs / rope.factor + blend * freqs
    slow = turns < rope.low_freq_factor
    fast = turns > rope.high_freq_factor
    return np.where(slow, freqs / rope.factor, np.where(fast, freqs, blended))


def rope_tables(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin), float32 [B, T, rotary_dim / 2].

    Args:
      positions: int32 [B, T], or [3, B, T] (T, H, W axes) for interleaved three-axis rope: frequency i
        takes axis H where i % 3 == 1 and W where i % 3 == 2, below three times the axis's section, else T.
        [B, T] under three-axis rope stands for equal axes.
    """
    freqs = jnp.asarray(inverse_frequencies(rope), jnp.float32)
    if positions.ndim == 3 and rope.mrope_section is None:
        positions = positions[0]
    angles = positions[..., None].astype(jnp.float32) * freqs
    if angles.ndim == 4:
        assert rope.mrope_section is not None
        index = np.arange(freqs.shape[0])
        _, height, width = rope.mrope_section
        axis = np.where((index % 3 == 1) & (index < 3 * height), 1, 0)
        axis = np.where((index % 3 == 2) & (index < 3 * width), 2, axis)
        angles = jnp.where(axis == 1, angles[1], jnp.where(axis == 2, angles[2], angles[0]))
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns `x` [B, T, heads..., H] with its first rotary_dim dims rotated; dtype float32."""
    cos, sin = tables
    half = cos.shape[-1]
    shape = (*cos.shape[:2], *([1] * (x.ndim - 3)), half)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
