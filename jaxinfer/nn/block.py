"""One decoder layer: a token mixer and a feed-forward part, each normalised and added to the residual."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax

from jaxinfer.config import LayerConfig, LayerKind, ModelConfig
from jaxinfer.nn.attention import AttentionParams, RopeTables, attention
from jaxinfer.nn.gated_delta import GatedDeltaParams, gated_delta
from jaxinfer.nn.mlp import MlpParams, mlp
from jaxinfer.nn.moe import MoeParams, moe
from jaxinfer.ops import AttentionImplementation, rms_norm
from jaxinfer.state import AttentionState, GatedDeltaState, Step


@flax.struct.dataclass
class BlockParams:
    """Weights of one layer. Norm scales are float32 [D] and hold the full multiplier.

    Attributes:
      mixer_norm: scale before the mixer.
      mixer: the token mixer's weights.
      mlp_norm: scale before the MLP.
      mlp: the MLP's weights, or those of its experts.
      mixer_post_norm, mlp_post_norm: scales on the parts' outputs, None where the family has none.
    """

    mixer_norm: jax.Array
    mixer: AttentionParams | GatedDeltaParams
    mlp_norm: jax.Array
    mlp: MlpParams | MoeParams
    mixer_post_norm: jax.Array | None = None
    mlp_post_norm: jax.Array | None = None


# Jitted on its own so that layers with equal configs are traced and lowered once; the compiler inlines it.
@functools.partial(jax.jit, static_argnames=("config", "layer", "implementation"))
def block(
    params: BlockParams,
    x: jax.Array,
    layer_state: AttentionState | GatedDeltaState | None,
    step: Step,
    rope: RopeTables | None,
    *,
    config: ModelConfig,
    layer: LayerConfig,
    implementation: AttentionImplementation | None,
) -> tuple[jax.Array, AttentionState | GatedDeltaState | None, tuple[Any, ...]]:
    """Returns (residual stream float32 [B, T, D] after the layer, the layer's new state, its part of each
    checkpoint at `step.checkpoint_at`)."""
    normed = rms_norm(x, params.mixer_norm, config.norm_eps)
    if layer.kind is LayerKind.GATED_DELTA:
        assert isinstance(params.mixer, GatedDeltaParams)  # params are of `config`
        assert layer_state is None or isinstance(layer_state, GatedDeltaState)
        mixed, new_state, saved = gated_delta(params.mixer, normed, layer_state, step, config=config)
    else:
        assert isinstance(params.mixer, AttentionParams)
        assert not isinstance(layer_state, GatedDeltaState)
        assert rope is not None  # every layer with attention has a rope: held by ModelConfig
        mixed, new_state, saved = attention(
            params.mixer,
            normed,
            layer_state,
            step,
            rope,
            config=config,
            layer=layer,
            implementation=implementation,
        )
    if config.post_norms:
        assert params.mixer_post_norm is not None  # params are of `config`
        mixed = rms_norm(mixed, params.mixer_post_norm, config.norm_eps)
    x = x + mixed
    normed = rms_norm(x, params.mlp_norm, config.norm_eps)
    if layer.mlp == "moe":
        assert isinstance(params.mlp, MoeParams)
        assert config.moe is not None  # held by ModelConfig
        out = moe(params.mlp, normed, config.activation, config.moe)
    else:
        assert isinstance(params.mlp, MlpParams)
        out = mlp(params.mlp, normed, config.activation)
    if config.post_norms:
        assert params.mlp_post_norm is not None
        out = rms_norm(out, params.mlp_post_norm, config.norm_eps)
    return x + out, new_state, saved
