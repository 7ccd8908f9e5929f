"""The gated feed-forward part of a layer (Shazeer, 2020)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.struct
import jax

from jaxinfer.ops import Weight, linear

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@flax.struct.dataclass
class MlpParams:
    """Weights of one gated MLP.

    Attributes:
      gate_up: [2, F, D]: gate, then up.
      down: [D, F].
    """

    gate_up: Weight
    down: Weight


def mlp(params: MlpParams, x: jax.Array, activation: str) -> jax.Array:
    """Returns `down(act(gate(x)) * up(x))`, float32 [B, T, D], for `x` [B, T, D]."""
    gate_up = linear(x, params.gate_up)  # [B, T, 2, F]
    return linear(ACTIVATIONS[activation](gate_up[..., 0, :]) * gate_up[..., 1, :], params.down)
