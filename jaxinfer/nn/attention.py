"""The attention part of a layer: project, normalise, rotate, write rows, attend, project back."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.ops import AttentionImplementation, Weight, apply_rope, linear, rms_norm, span_attention
from jaxinfer.state import AttentionState, Rows, Step

RopeTables = tuple[jax.Array, jax.Array]


@flax.struct.dataclass
class AttentionParams:
    """Weights of one attention layer. G = N / K query heads share a key/value head.

    Attributes:
      qkv: [K, G + 2, H, D]: for each key/value head its G query heads, its key, its value; with an output
        gate [K, 2 G + 2, H, D], the G gates after the queries. Grouped so that K can be sharded.
      out: [D, N * H].
      q_norm: float32 [H], or None; k_norm: likewise.
    """

    qkv: Weight
    out: Weight
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None


def attention(
    params: AttentionParams,
    x: jax.Array,
    layer_state: AttentionState | None,
    step: Step,
    rope: RopeTables,
    *,
    config: ModelConfig,
    layer: LayerConfig,
    implementation: AttentionImplementation | None,
) -> tuple[jax.Array, AttentionState | None, tuple[Any, ...]]:
    """Returns (output float32 [B, T, D], the layer's state with this step's rows, what the layer's part of
    each checkpoint at `step.checkpoint_at` holds).

    Args:
      x: normalised input, [B, T, D].
      layer_state: None for a pass without a cache: the step's rows are all there is to attend over.
      rope: (cos, sin) of the layer's rope at the step's positions.
      implementation: of span attention; None takes the best for the device.
    """
    batch, q_len, _ = x.shape
    groups = config.num_groups
    projected = linear(x, params.qkv)  # [B, T, K, G + 2, H]
    query, gate = projected[:, :, :, :groups], None
    if config.attention_gate:
        gate = projected[:, :, :, groups : 2 * groups]
    key, value = projected[:, :, :, -2], projected[:, :, :, -1]
    if config.qk_norm:
        assert params.q_norm is not None  # params are of `config`
        assert params.k_norm is not None
        query = rms_norm(query, params.q_norm, config.norm_eps)
        key = rms_norm(key, params.k_norm, config.norm_eps)
    query = apply_rope(query, rope).reshape(batch, q_len, config.num_q_heads, config.head_dim)
    key = jnp.swapaxes(apply_rope(key, rope), 1, 2)
    value = jnp.swapaxes(value, 1, 2)

    spans = step.layer_spans(layer)
    saved: tuple[Any, ...] = ()
    if layer_state is None:
        dtype = jnp.dtype(config.dtype)
        rows = Rows(key.astype(dtype), value.astype(dtype), spans.lo, spans.hi)
    else:
        layer_state, rows = layer_state.write(step, spans, key, value)
    mixed = span_attention(
        query.astype(rows.key.dtype),
        rows.key,
        rows.value,
        rows.lo,
        rows.hi,
        softmax_scale=config.softmax_scale,
        implementation=implementation,
    )
    if layer_state is not None:
        # Before eviction drops what they need.
        saved = tuple(layer_state.checkpoint(length) for length in step.checkpoint_lengths)
        layer_state = layer_state.evict(step, mixed)
    if gate is not None:
        gate = gate.reshape(mixed.shape)
        mixed = mixed.astype(jnp.float32) * jax.nn.sigmoid(gate)
    return linear(mixed.reshape(batch, q_len, -1), params.out), layer_state, saved
