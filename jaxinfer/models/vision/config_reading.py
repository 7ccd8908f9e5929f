"""Reading the image tower of a `config.json`, and of the preprocessor's config where a checkpoint has one.

The preprocessor's facts (`preprocessor_config.json`) stand under `PREPROCESSOR_KEY` of the config; where they
are missing those of the family's published checkpoints hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.config import VisionConfig
from jaxinfer.models.config_reading import require

PREPROCESSOR_KEY = "preprocessor_config"

_GEMMA_TOKENS = 256
_QWEN_PIXELS = (65_536, 16_777_216)
_BILINEAR, _BICUBIC = 2, 3  # Pillow's numbers


def read_siglip(raw: Mapping[str, Any]) -> VisionConfig:
    """Returns the tower of a Gemma 3 checkpoint; ValueError for one that this library does not compute."""
    vision, text = require(raw, "vision_config"), require(raw, "text_config")
    image_size, patch_size = require(vision, "image_size"), require(vision, "patch_size")
    tokens = raw.get("mm_tokens_per_image") or _GEMMA_TOKENS
    side = image_size // patch_size
    tokens_a_side = math.isqrt(tokens)
    if tokens_a_side**2 != tokens or side % tokens_a_side:
        raise ValueError(
            f"config.json: mm_tokens_per_image={tokens} must be a square whose side divides "
            f"{side} = image_size {image_size} // patch_size {patch_size}"
        )
    preprocessor = _preprocessor(raw, _BILINEAR)
    size = preprocessor.get("size") or {}
    if any(size.get(edge, image_size) != image_size for edge in ("height", "width")):
        raise ValueError(f"{PREPROCESSOR_KEY}.json: size={size} does not fit image_size={image_size}")
    return VisionConfig(
        kind="siglip",
        num_layers=require(vision, "num_hidden_layers"),
        num_heads=require(vision, "num_attention_heads"),
        patch_size=patch_size,
        merge_size=side // tokens_a_side,
        num_positions=side**2,
        out_dim=require(text, "hidden_size"),
        norm_eps=vision.get("layer_norm_eps") or 1e-6,
        num_channels=vision.get("num_channels") or 3,
        image_size=image_size,
        begin_token_id=raw.get("boi_token_index"),
        end_token_id=raw.get("eoi_token_index"),
        **_shared(vision, preprocessor),
    )


def read_qwen_vl(raw: Mapping[str, Any], *, has_deepstack: bool) -> VisionConfig:
    """Returns the tower of a Qwen3-VL or, without deepstack, a Qwen3.5 checkpoint; ValueError as above."""
    vision = require(raw, "vision_config")
    preprocessor = _preprocessor(raw, _BICUBIC)
    sizes = {
        "patch_size": require(vision, "patch_size"),
        "temporal_patch_size": vision.get("temporal_patch_size") or 2,
        "merge_size": vision.get("spatial_merge_size") or 2,
    }
    for name, size in sizes.items():
        if preprocessor.get(name, size) != size:
            raise ValueError(
                f"{PREPROCESSOR_KEY}.json: {name}={preprocessor[name]} does not fit vision_config's {size}"
            )
    bounds = preprocessor.get("size") or {}
    least, most = _QWEN_PIXELS
    rope = vision.get("rope_parameters") or {}
    return VisionConfig(
        kind="qwen_vl",
        num_layers=require(vision, "depth"),
        num_heads=require(vision, "num_heads"),
        num_positions=require(vision, "num_position_embeddings"),
        out_dim=require(vision, "out_hidden_size"),
        num_channels=vision.get("in_channels") or 3,
        rope_theta=float(rope.get("rope_theta") or 10_000.0),
        deepstack_layers=tuple(require(vision, "deepstack_visual_indexes")) if has_deepstack else (),
        min_pixels=preprocessor.get("min_pixels") or bounds.get("shortest_edge") or least,
        max_pixels=preprocessor.get("max_pixels") or bounds.get("longest_edge") or most,
        begin_token_id=raw.get("vision_start_token_id"),
        end_token_id=raw.get("vision_end_token_id"),
        **sizes,
        **_shared(vision, preprocessor),
    )


def _shared(vision: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    act = vision.get("hidden_act") or "gelu_pytorch_tanh"
    if act != "gelu_pytorch_tanh":
        raise ValueError(f"config.json has hidden_act={act!r} in vision_config; known is 'gelu_pytorch_tanh'")
    return {
        "embed_dim": require(vision, "hidden_size"),
        "mlp_dim": require(vision, "intermediate_size"),
        "mean": tuple(preprocessor.get("image_mean") or (0.5,) * 3),
        "std": tuple(preprocessor.get("image_std") or (0.5,) * 3),
    }


def _preprocessor(raw: Mapping[str, Any], resample: int) -> Mapping[str, Any]:
    """Returns the preprocessor's facts, {} where there are none; ValueError for steps that are not ours."""
    facts = raw.get(PREPROCESSOR_KEY) or {}
    expected = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": resample}
    for name, value in expected.items():
        if facts.get(name) is not None and facts[name] != value:
            raise ValueError(
                f"{PREPROCESSOR_KEY}.json: {name}={facts[name]!r} is not supported; {value!r} is"
            )
    factor = facts.get("rescale_factor")
    if factor is not None and not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ValueError(f"{PREPROCESSOR_KEY}.json: rescale_factor={factor!r} is not supported; 1/255 is")
    return facts
