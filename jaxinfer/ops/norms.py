"""Normalisation; computed in float32."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns `x / sqrt(mean(x^2) + eps) * scale` over the last axis, float32 (Zhang & Sennrich, 2019).

    Args:
      x: `[..., D]`.
      scale: float32 `[D]`, the full multiplier: families that store w for (1 + w) add the one at load.
    """
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Returns `(x - mean) / sqrt(variance + eps) * scale + bias` over the last axis, float32.

    Source: Ba, Kiros, Hinton, "Layer normalization" (2016).

    Args:
      x: `[..., D]`.
      scale, bias: float32 `[D]`.
    """
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale + bias
