"""The mixture-of-experts part of a layer: a router chooses a few gated MLPs for each token."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.config import MoeConfig
from jaxinfer.nn.mlp import ACTIVATIONS, MlpParams, mlp
from jaxinfer.ops import Weight, linear, routed_mlp


@flax.struct.dataclass
class MoeParams:
    """Weights of one layer's experts.

    Attributes:
      router: [E, D].
      gate_up: [E, 2, F, D]: gate, then up, of each expert.
      down: [E, D, F].
      shared: an expert that every token goes through, None where there is none.
      shared_gate: [1, D], the shared expert's sigmoid gate; None without one.
    """

    router: jax.Array
    gate_up: Weight
    down: Weight
    shared: MlpParams | None = None
    shared_gate: jax.Array | None = None


def moe(params: MoeParams, x: jax.Array, activation: str, config: MoeConfig) -> jax.Array:
    """Returns the weighted sum of each token's experts, float32 [B, T, D], for `x` [B, T, D].

    Columns do not influence one another, so padding changes nothing.
    """
    expert_ids, weights = route(params.router, x, config)
    out = routed_mlp(
        x.reshape(-1, x.shape[-1]),
        params.gate_up,
        params.down,
        expert_ids.reshape(-1, expert_ids.shape[-1]),
        weights.reshape(-1, weights.shape[-1]),
        activation=ACTIVATIONS[activation],
    ).reshape(x.shape)
    if params.shared is not None:
        assert params.shared_gate is not None  # the two go together
        out = out + jax.nn.sigmoid(linear(x, params.shared_gate)) * mlp(params.shared, x, activation)
    return out


def route(router: jax.Array, x: jax.Array, config: MoeConfig) -> tuple[jax.Array, jax.Array]:
    """Returns (expert ids int32, weights float32), both [B, T, k], by descending weight.

    The weights are the greatest k of a softmax over all experts, divided by their sum where the config
    says so. Of equal weights the lower expert goes first.
    """
    shares = jax.nn.softmax(linear(x, router), axis=-1)
    weights, expert_ids = lax.top_k(shares, config.num_experts_per_token)
    if config.normalize_weights:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return expert_ids, weights
