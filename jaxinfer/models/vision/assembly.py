"""From a checkpoint's tensors to a tower's params: which tensors make which weight."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from jaxinfer.config import VisionConfig
from jaxinfer.models.params import leaf
from jaxinfer.models.stored_weights import Put, StoredWeight, Tensors, stack
from jaxinfer.models.vision.params import MergerParams, SiglipProjectorParams, VisionParams
from jaxinfer.nn import AffineParams, EncoderBlockParams, LayerNormParams

_TOWERS = {
    "siglip": tuple(
        f"{outer}vision_tower.{inner}" for outer in ("", "model.") for inner in ("vision_model.", "")
    ),
    "qwen_vl": ("model.visual.", "visual."),
}
_PROJECTORS = ("multi_modal_projector.", "model.multi_modal_projector.")


def vision_recipe(config: VisionConfig, tensors: Tensors) -> VisionParams:
    """Returns the params of `config` with `StoredWeight` leaves, under the checkpoint's own prefix."""
    reader = _Reader(tensors, _found(_TOWERS[config.kind], tensors))
    if config.kind == "siglip":
        return _siglip(config, reader, _Reader(tensors, _found(_PROJECTORS, tensors)))
    return _qwen_vl(config, reader)


def _found(prefixes: tuple[str, ...], tensors: Tensors) -> str:
    names = tensors.names()
    return next((p for p in prefixes if any(name.startswith(p) for name in names)), prefixes[0])


class _Reader:
    """The tensors under one prefix, as leaves of a recipe."""

    def __init__(self, tensors: Tensors, prefix: str):
        self.tensors, self.prefix = tensors, prefix

    def weight(self, name: str, *shape: int) -> jax.Array:
        return leaf(StoredWeight(self.tensors, (self.prefix + name,), (shape,)))

    def joined(self, names: Iterable[str], *shape: int, put: Put = stack) -> jax.Array:
        names = [self.prefix + name for name in names]
        return leaf(StoredWeight(self.tensors, names, [shape] * len(names), put=put))

    def affine(self, name: str, rows: int, *columns: int) -> AffineParams:
        return AffineParams(self.weight(f"{name}.weight", rows, *columns), self.weight(f"{name}.bias", rows))

    def norm(self, name: str, size: int) -> LayerNormParams:
        return LayerNormParams(self.weight(f"{name}.weight", size), self.weight(f"{name}.bias", size))


def _siglip(config: VisionConfig, tower: _Reader, projector: _Reader) -> VisionParams:
    size, patch = config.embed_dim, config.patch_size

    def block(index: int) -> EncoderBlockParams:
        at = f"encoder.layers.{index}."
        heads = [f"{at}self_attn.{part}_proj" for part in "qkv"]
        return EncoderBlockParams(
            attention_norm=tower.norm(f"{at}layer_norm1", size),
            qkv=AffineParams(
                tower.joined([f"{name}.weight" for name in heads], size, size),
                tower.joined([f"{name}.bias" for name in heads], size),
            ),
            out=tower.affine(f"{at}self_attn.out_proj", size, size),
            mlp_norm=tower.norm(f"{at}layer_norm2", size),
            up=tower.affine(f"{at}mlp.fc1", config.mlp_dim, size),
            down=tower.affine(f"{at}mlp.fc2", size, config.mlp_dim),
        )

    def put_transposed(out: np.ndarray, index: int, tensor: np.ndarray) -> None:
        out[:] = tensor.T

    token_norm = f"{projector.prefix}mm_soft_emb_norm.weight"
    return VisionParams(
        patch=tower.affine("embeddings.patch_embedding", size, config.num_channels, patch, patch),
        positions=tower.weight("embeddings.position_embedding.weight", config.num_positions, size),
        blocks=tuple(block(index) for index in range(config.num_layers)),
        projector=SiglipProjectorParams(
            patch_norm=tower.norm("post_layernorm", size),
            # Stored as w of (1 + w), as all of Gemma's norms are.
            token_norm=leaf(StoredWeight(projector.tensors, (token_norm,), ((size,),), offset=1.0)),
            out=projector.joined(["mm_input_projection_weight"], size, config.out_dim, put=put_transposed),
        ),
    )


def _qwen_vl(config: VisionConfig, tower: _Reader) -> VisionParams:
    size, patch = config.embed_dim, config.patch_size
    joined = config.merge_size**2 * size

    def block(index: int) -> EncoderBlockParams:
        at = f"blocks.{index}."
        return EncoderBlockParams(
            attention_norm=tower.norm(f"{at}norm1", size),
            qkv=tower.affine(f"{at}attn.qkv", 3 * size, size),
            out=tower.affine(f"{at}attn.proj", size, size),
            mlp_norm=tower.norm(f"{at}norm2", size),
            up=tower.affine(f"{at}mlp.linear_fc1", config.mlp_dim, size),
            down=tower.affine(f"{at}mlp.linear_fc2", size, config.mlp_dim),
        )

    def merger(at: str, norm_size: int) -> MergerParams:
        return MergerParams(
            norm=tower.norm(f"{at}norm", norm_size),
            up=tower.affine(f"{at}linear_fc1", joined, joined),
            down=tower.affine(f"{at}linear_fc2", config.out_dim, joined),
        )

    frames, channels = config.temporal_patch_size, config.num_channels
    return VisionParams(
        patch=tower.affine("patch_embed.proj", size, channels, frames, patch, patch),
        positions=tower.weight("pos_embed.weight", config.num_positions, size),
        blocks=tuple(block(index) for index in range(config.num_layers)),
        projector=merger("merger.", size),
        deepstack=tuple(
            merger(f"deepstack_merger_list.{index}.", joined) for index in range(len(config.deepstack_layers))
        ),
    )
