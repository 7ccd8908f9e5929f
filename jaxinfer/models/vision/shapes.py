"""A tower's weights before any weight exists."""

from __future__ import annotations

from jaxinfer.config import VisionConfig
from jaxinfer.models.params import scale_shape, shape_maker
from jaxinfer.models.vision.params import MergerParams, SiglipProjectorParams, VisionParams
from jaxinfer.nn import AffineParams, EncoderBlockParams, LayerNormParams


def vision_param_shapes(config: VisionConfig, dtype: str) -> VisionParams:
    """Returns the params of `config` with `jax.ShapeDtypeStruct` leaves; matrices have `dtype`.

    For loading, random weights, and compiling without weights.
    """
    weight, vector, size = shape_maker(dtype), scale_shape, config.embed_dim

    def norm(channels: int) -> LayerNormParams:
        return LayerNormParams(vector(channels), vector(channels))

    def affine(rows: int, columns: int) -> AffineParams:
        return AffineParams(weight(rows, columns), vector(rows))

    def merger(norm_size: int) -> MergerParams:
        joined = config.merge_size**2 * size
        return MergerParams(norm(norm_size), affine(joined, joined), affine(config.out_dim, joined))

    heads = (3, config.num_heads, config.head_dim)
    block = EncoderBlockParams(
        attention_norm=norm(size),
        qkv=AffineParams(weight(*heads, size), vector(*heads)),
        out=affine(size, size),
        mlp_norm=norm(size),
        up=affine(config.mlp_dim, size),
        down=affine(size, config.mlp_dim),
    )
    projector = SiglipProjectorParams(norm(size), vector(size), weight(config.out_dim, size))
    return VisionParams(
        patch=affine(size, config.patch_dim),
        positions=weight(config.num_positions, size),
        blocks=(block,) * config.num_layers,
        projector=projector if config.kind == "siglip" else merger(size),
        deepstack=(merger(config.merge_size**2 * size),) * len(config.deepstack_layers),
    )
