"""A contender of `benchmarks.vision`: one image tower with random weights, here or in transformers.

    python -m benchmarks.vision_worker jaxinfer|transformers DTYPE LAYERS

Each side imports only its own library, so that the peer runs in an environment of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.worker import peak_bytes, serve

# Gemma 3's tower and projector (4B): 896 x 896 pixels, 4,096 patches, 256 tokens.
SIZES = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
OUT_DIM, TOKENS = 2560, 256


def jaxinfer_tower(dtype: str, layers: int) -> tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]:
    import jax

    import jaxinfer as ji
    from jaxinfer.models import vision_param_shapes
    from jaxinfer.ops import attention_implementations

    config = ji.VisionConfig(
        kind="siglip",
        embed_dim=SIZES["hidden_size"],
        mlp_dim=SIZES["intermediate_size"],
        num_layers=layers,
        num_heads=SIZES["num_attention_heads"],
        patch_size=SIZES["patch_size"],
        merge_size=4,
        num_positions=(SIZES["image_size"] // SIZES["patch_size"]) ** 2,
        out_dim=OUT_DIM,
        image_size=SIZES["image_size"],
    )
    random = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        std = leaf.shape[-1] ** -0.5 if len(leaf.shape) > 1 else 0.02
        return jax.numpy.asarray(std * random.standard_normal(leaf.shape, np.float32), leaf.dtype)

    params = jax.block_until_ready(jax.tree.map(draw, vision_param_shapes(config, dtype)))

    def encode(pixels: np.ndarray) -> np.ndarray:
        return np.asarray(ji.encode_image(params, pixels, config=config).embeddings)

    has_native = attention_implementations()["native"] is None and dtype == "bfloat16"
    return {
        "versions": {"jax": jax.__version__},
        "attention": "native" if has_native else "xla",
    }, encode


def transformers_tower(dtype: str, layers: int) -> tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]:
    import torch
    import transformers
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_num_interop_threads(1)
    vision = dict(SIZES, num_hidden_layers=layers, vision_use_head=False)
    config = transformers.Gemma3Config(
        vision_config=dict(vision, model_type="siglip_vision_model"),
        text_config={"hidden_size": OUT_DIM},
        mm_tokens_per_image=TOKENS,
    )
    tower = transformers.SiglipVisionModel(config.vision_config)
    projector = Gemma3MultiModalProjector(config)
    torch.nn.init.normal_(projector.mm_input_projection_weight, std=0.02)
    tower, projector = (part.to(getattr(torch, dtype)).eval() for part in (tower, projector))

    @torch.inference_mode()
    def encode(pixels: np.ndarray) -> np.ndarray:
        hidden = tower(pixel_values=torch.from_numpy(pixels)[None].to(tower.dtype)).last_hidden_state
        return projector(hidden)[0].float().numpy()

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"versions": versions, "attention": tower.config._attn_implementation}, encode


def main() -> None:
    library, dtype, layers = sys.argv[1:]
    make = {"jaxinfer": jaxinfer_tower, "transformers": transformers_tower}[library]
    hello, encode = make(dtype, int(layers))
    side = SIZES["image_size"]
    pixels = np.random.default_rng(1).uniform(-1, 1, (3, side, side)).astype(np.float32)

    def one_image() -> Mapping[str, Any]:
        began = time.perf_counter()
        features = encode(pixels)
        seconds = time.perf_counter() - began
        if features.shape != (TOKENS, OUT_DIM) or not np.isfinite(features).all():
            raise ValueError(f"features are {features.shape}, or not finite")
        return {"seconds": seconds, "tokens": []}

    serve(hello, {"encode": one_image, "peak": lambda: {"peak_bytes": peak_bytes()}})


if __name__ == "__main__":
    main()
