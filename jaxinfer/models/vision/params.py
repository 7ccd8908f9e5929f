"""A tower's weights as one pytree, and what it gives."""

from __future__ import annotations

import flax.struct
import jax

from jaxinfer.nn import AffineParams, EncoderBlockParams, LayerNormParams


@flax.struct.dataclass
class SiglipProjectorParams:
    """From SigLIP's patches to Gemma's embeddings.

    Attributes:
      patch_norm: over the patches, before they are pooled.
      token_norm: float32 [E], the full multiplier of the RMS norm of pooled patches.
      out: [D, E].
    """

    patch_norm: LayerNormParams
    token_norm: jax.Array
    out: jax.Array


@flax.struct.dataclass
class MergerParams:
    """Joins m x m patches into a token. M = m * m * E.

    Attributes:
      norm: of E channels before the patches are joined, or of M channels after.
      up: [M, M].
      down: [D, M].
    """

    norm: LayerNormParams
    up: AffineParams
    down: AffineParams


@flax.struct.dataclass
class VisionParams:
    """Weights of an image tower. E channels, D those of the decoder.

    Attributes:
      patch: [E, C * frames * P * P].
      positions: [num_positions, E], row by row of a square.
      blocks: one entry a layer.
      projector: what turns patches into embeddings.
      deepstack: a merger for each of `VisionConfig.deepstack_layers`.
    """

    patch: AffineParams
    positions: jax.Array
    blocks: tuple[EncoderBlockParams, ...]
    projector: SiglipProjectorParams | MergerParams
    deepstack: tuple[MergerParams, ...] = ()


@flax.struct.dataclass
class ImageFeatures:
    """What a tower makes of one image of n tokens.

    Attributes:
      embeddings: float32 [n, D], in the place of the image's token embeddings; not scaled.
      deepstack: float32 [j, n, D], added after each of the first j decoder layers; None without.
    """

    embeddings: jax.Array
    deepstack: jax.Array | None = None
