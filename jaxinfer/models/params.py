"""The decoder's weights as one pytree, and their shapes before any weight exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import flax.struct
import jax
import jax.numpy as jnp

from jaxinfer.config import LayerConfig, LayerKind, ModelConfig
from jaxinfer.nn import AttentionParams, BlockParams, GatedDeltaParams, MlpParams, MoeParams
from jaxinfer.ops import Weight, quantized_shape


@flax.struct.dataclass
class DecoderParams:
    """Weights of a decoder-only model. Matrices may be quantised, see `jaxinfer.ops.QuantizedWeight`.

    Attributes:
      embedding: [V, D].
      layers: one entry a layer.
      final_norm: float32 [D].
      lm_head: [V, D], None where the embedding is the output projection too.
    """

    embedding: Weight
    layers: tuple[BlockParams, ...]
    final_norm: jax.Array
    lm_head: Weight | None


def leaf(stand_in: object) -> jax.Array:
    """Returns `stand_in` itself, typed as the array in whose place it stands.

    Params of the same classes also describe weights that do not exist yet: their leaves are then shapes, or
    the stored tensors to read. Such a pytree is only mapped over, never computed with.
    """
    return cast("jax.Array", stand_in)


def param_shapes(config: ModelConfig) -> DecoderParams:
    """Returns the params of `config` with `jax.ShapeDtypeStruct` leaves: for loading, random weights, and
    compiling without weights."""
    matrix = _matrix_maker(config)
    return DecoderParams(
        embedding=matrix(config.vocab_size, config.embed_dim),
        layers=tuple(_block_shapes(config, layer) for layer in config.layers),
        final_norm=scale_shape(config.embed_dim),
        lm_head=None if config.tie_embeddings else matrix(config.vocab_size, config.embed_dim),
    )


def _block_shapes(config: ModelConfig, layer: LayerConfig) -> BlockParams:
    def post_norm() -> jax.Array | None:
        return scale_shape(config.embed_dim) if config.post_norms else None

    is_recurrent = layer.kind is LayerKind.GATED_DELTA
    return BlockParams(
        mixer_norm=scale_shape(config.embed_dim),
        mixer=_gated_delta_shapes(config) if is_recurrent else _attention_shapes(config),
        mlp_norm=scale_shape(config.embed_dim),
        mlp=_moe_shapes(config) if layer.mlp == "moe" else _mlp_shapes(config, config.mlp_dim),
        mixer_post_norm=post_norm(),
        mlp_post_norm=post_norm(),
    )


def _attention_shapes(config: ModelConfig) -> AttentionParams:
    matrix = _matrix_maker(config)
    queries = config.num_groups * (2 if config.attention_gate else 1)
    return AttentionParams(
        qkv=matrix(config.num_kv_heads, queries + 2, config.head_dim, config.embed_dim),
        out=matrix(config.embed_dim, config.num_q_heads * config.head_dim),
        q_norm=scale_shape(config.head_dim) if config.qk_norm else None,
        k_norm=scale_shape(config.head_dim) if config.qk_norm else None,
    )


def _gated_delta_shapes(config: ModelConfig) -> GatedDeltaParams:
    weight, matrix, sizes = shape_maker(config.dtype), _matrix_maker(config), config.gated_delta
    assert sizes is not None  # held by ModelConfig
    values = sizes.num_groups * sizes.value_head_dim
    return GatedDeltaParams(
        in_proj=matrix(
            sizes.num_key_heads,
            2 * sizes.key_head_dim + 2 * values + 2 * sizes.num_groups,
            config.embed_dim,
        ),
        conv=weight(sizes.num_key_heads, sizes.conv_channels_per_key_head, sizes.conv_width),
        log_rate=scale_shape(sizes.num_value_heads),
        dt_bias=scale_shape(sizes.num_value_heads),
        norm=scale_shape(sizes.value_head_dim),
        out=matrix(config.embed_dim, sizes.num_value_heads * sizes.value_head_dim),
    )


def _mlp_shapes(config: ModelConfig, mlp_dim: int) -> MlpParams:
    matrix = _matrix_maker(config)
    return MlpParams(gate_up=matrix(2, mlp_dim, config.embed_dim), down=matrix(config.embed_dim, mlp_dim))


def _moe_shapes(config: ModelConfig) -> MoeParams:
    weight, matrix, moe = shape_maker(config.dtype), _matrix_maker(config), config.moe
    assert moe is not None  # held by ModelConfig
    shared = moe.shared_mlp_dim
    return MoeParams(
        router=weight(moe.num_experts, config.embed_dim),
        gate_up=matrix(moe.num_experts, 2, moe.mlp_dim, config.embed_dim),
        down=matrix(moe.num_experts, config.embed_dim, moe.mlp_dim),
        shared=None if shared is None else _mlp_shapes(config, shared),
        shared_gate=None if shared is None else weight(1, config.embed_dim),
    )


def _matrix_maker(config: ModelConfig) -> Callable[..., Weight]:
    """Returns a function from sizes to the stand-in of a matrix, quantised where the config says so.

    Routers, gates of one channel and convolutions are small and stay as they are.
    """
    return quantized_shape if config.quantization else shape_maker(config.dtype)


def shape_maker(dtype: str) -> Callable[..., jax.Array]:
    """Returns a function from sizes to the stand-in of a weight of those sizes."""
    return lambda *shape: leaf(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


def scale_shape(*shape: int) -> jax.Array:
    """Returns the stand-in of what is float32 in every model: norm scales and biases."""
    return leaf(jax.ShapeDtypeStruct(shape, jnp.float32))
