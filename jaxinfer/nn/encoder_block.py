"""One layer of an image tower: attention among all patches and an MLP, with biases and layer norms."""

from __future__ import annotations

import functools

import flax.struct
import jax

from jaxinfer.ops import apply_rope, full_attention, layer_norm, linear


@flax.struct.dataclass
class LayerNormParams:
    """Attributes: scale, bias: float32 [E]."""

    scale: jax.Array
    bias: jax.Array


@flax.struct.dataclass
class AffineParams:
    """Attributes: weight: [out..., in]; bias: float32 [out...]."""

    weight: jax.Array
    bias: jax.Array


@flax.struct.dataclass
class EncoderBlockParams:
    """Weights of one layer; N heads of H channels.

    Attributes:
      attention_norm, mlp_norm: before the two parts.
      qkv: [3, N, H, E]: queries, keys, values.
      out: [E, N * H].
      up: [F, E]; down: [E, F].
    """

    attention_norm: LayerNormParams
    qkv: AffineParams
    out: AffineParams
    mlp_norm: LayerNormParams
    up: AffineParams
    down: AffineParams


def affine(params: AffineParams, x: jax.Array) -> jax.Array:
    """Returns `x @ weight^T + bias`, float32 [..., out...], for `x` [..., in]."""
    return linear(x, params.weight) + params.bias


def normed(params: LayerNormParams, x: jax.Array, eps: float) -> jax.Array:
    """Returns the layer norm of `x` [..., E], float32."""
    return layer_norm(x, params.scale, params.bias, eps)


# Jitted on its own so that equal layers are traced and lowered once; the compiler inlines it.
@functools.partial(jax.jit, static_argnames="eps")
def encoder_block(
    params: EncoderBlockParams,
    x: jax.Array,
    length: jax.Array | None,
    rope: tuple[jax.Array, jax.Array] | None,
    *,
    eps: float,
) -> jax.Array:
    """Returns the residual stream float32 [N, E] after the layer, for the patches `x` [N, E] of one image.

    Args:
      length: int32, how many patches are real, the rest being padding that no real one reads; None: all.
      rope: (cos, sin), [N, H / 2] each; None: without.
    """
    x = x + affine(params.out, _attended(params.qkv, normed(params.attention_norm, x, eps), length, rope))
    hidden = jax.nn.gelu(affine(params.up, normed(params.mlp_norm, x, eps)), approximate=True)
    return x + affine(params.down, hidden)


def _attended(
    qkv: AffineParams, x: jax.Array, length: jax.Array | None, rope: tuple[jax.Array, jax.Array] | None
) -> jax.Array:
    projected = affine(qkv, x)  # [N, 3, heads, H]
    query, key, value = (projected[:, part] for part in range(3))
    if rope is not None:
        tables = (rope[0][None], rope[1][None])  # of a batch of one
        query, key = apply_rope(query[None], tables)[0], apply_rope(key[None], tables)[0]
    dtype = qkv.weight.dtype
    mixed = full_attention(
        query.astype(dtype),
        key.astype(dtype),
        value.astype(dtype),
        length,
        softmax_scale=query.shape[-1] ** -0.5,
    )
    return mixed.reshape(x.shape[0], -1)
