"""The Gated DeltaNet part of a layer: project, convolve, run the rule, norm and gate, project back.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), figure 1, as Qwen3-Next arranges it.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxinfer.config import GatedDeltaConfig, ModelConfig
from jaxinfer.ops import Weight, causal_conv, conv_history, gated_delta_chunk, linear, rms_norm
from jaxinfer.state import GatedDeltaState, Step


@flax.struct.dataclass
class GatedDeltaParams:
    """Weights of one Gated DeltaNet layer. r = nv / nk value heads read a key head.

    Attributes:
      in_proj: [nk, 2 dk + 2 r dv + 2 r, D]: for each key head its query, its key, its values, their output
        gates, their write strengths (beta), their decays. Grouped so that nk can be sharded.
      conv: [nk, 2 dk + r dv, K], over query, key and values.
      log_rate: float32 [nv], the decay's rate ("A_log").
      dt_bias: float32 [nv], added to the decay's input.
      norm: float32 [dv], scale of the norm of each head's output.
      out: [D, nv * dv].
    """

    in_proj: Weight
    conv: jax.Array
    log_rate: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out: Weight


def gated_delta(
    params: GatedDeltaParams,
    x: jax.Array,
    layer_state: GatedDeltaState | None,
    step: Step,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, GatedDeltaState | None, tuple[GatedDeltaState, ...]]:
    """Returns (output float32 [B, T, D], the layer's state after the step, its states at each length of
    `step.checkpoint_at`). Padding columns change no state.

    Args:
      x: normalised input, [B, T, D].
      layer_state: None for a pass without a cache: nothing came before.
    """
    sizes = config.gated_delta
    assert sizes is not None  # held by ModelConfig
    batch, q_len, _ = x.shape
    before = _nothing_before(sizes, batch, config.dtype) if layer_state is None else layer_state
    mixed, gate, beta, rate_input = _projected(params, x, sizes)
    conv_out, conv_state = causal_conv(
        mixed,
        params.conv.reshape(sizes.conv_channels, sizes.conv_width),
        history=before.conv_state,
        lengths=step.lengths,
    )
    query, key, value = _heads(jax.nn.silu(conv_out), sizes)
    columns = None if step.checkpoint_at is None else step.checkpoint_at - step.start[:, None]
    out, recurrent_state, saved = gated_delta_chunk(
        query,
        key,
        value,
        -jnp.exp(params.log_rate) * jax.nn.softplus(rate_input + params.dt_bias),
        jax.nn.sigmoid(beta),
        initial_state=before.recurrent_state,
        lengths=step.lengths,
        checkpoint_columns=columns,
    )
    out = rms_norm(out, params.norm, config.norm_eps) * jax.nn.silu(gate)
    out = linear(out.reshape(batch, q_len, -1), params.out)
    if layer_state is None:
        return out, None, ()
    checkpoints: tuple[GatedDeltaState, ...] = ()
    if columns is not None and saved is not None:
        conv = conv_history(mixed, history=before.conv_state, after=columns)
        checkpoints = tuple(GatedDeltaState(saved[:, i], conv[:, i]) for i in range(columns.shape[1]))
    return out, GatedDeltaState(recurrent_state, conv_state), checkpoints


def _nothing_before(sizes: GatedDeltaConfig, batch: int, dtype: str) -> GatedDeltaState:
    heads = (sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
    return GatedDeltaState(
        jnp.zeros((batch, *heads), jnp.float32),
        jnp.zeros((batch, sizes.conv_width - 1, sizes.conv_channels), dtype),
    )


def _projected(
    params: GatedDeltaParams, x: jax.Array, sizes: GatedDeltaConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (inputs of the convolution [B, T, C], output gates [B, T, nv, dv], inputs of beta and of the
    decay, [B, T, nv] each), float32."""
    batch, q_len, _ = x.shape
    projected = linear(x, params.in_proj)  # [B, T, nk, 2 dk + 2 r dv + 2 r]
    mixed_end = sizes.conv_channels_per_key_head
    gate_end = mixed_end + sizes.num_groups * sizes.value_head_dim
    beta_end = gate_end + sizes.num_groups
    return (
        projected[..., :mixed_end].reshape(batch, q_len, sizes.conv_channels),
        projected[..., mixed_end:gate_end].reshape(batch, q_len, sizes.num_value_heads, -1),
        projected[..., gate_end:beta_end].reshape(batch, q_len, -1),
        projected[..., beta_end:].reshape(batch, q_len, -1),
    )


def _heads(x: jax.Array, sizes: GatedDeltaConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (query, key [B, T, nk, dk], value [B, T, nv, dv]) of the convolution's channels [B, T, C]."""
    batch, q_len, _ = x.shape
    grouped = x.reshape(batch, q_len, sizes.num_key_heads, -1)
    query, key, value = jnp.split(grouped, (sizes.key_head_dim, 2 * sizes.key_head_dim), axis=-1)
    return query, key, value.reshape(batch, q_len, sizes.num_value_heads, sizes.value_head_dim)
