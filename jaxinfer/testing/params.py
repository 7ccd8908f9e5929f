"""Random weights at which a model computes something: activations near one, logits spread wider than one."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.models import DecoderParams, VisionParams, param_shapes, vision_param_shapes
from jaxinfer.ops import QuantizedWeight, Weight, is_quantized, quantize

_LOGIT_STD = 1.3
# A tied embedding is the output projection too. Were it large, every token would predict itself, so it is
# small and the final norm makes up for it.
_TIED_EMBEDDING_STD = 0.04


def random_params(config: ModelConfig, seed: int = 0) -> DecoderParams:
    """Returns params of `config` in its dtype, drawn from `seed`; each weight from its own name, so that a
    change of the config leaves the others as they were."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _draw(jax.tree_util.keystr(path), leaf, config, seed),
        param_shapes(config),
        is_leaf=is_quantized,
    )


def random_vision_params(config: ModelConfig, seed: int = 0) -> VisionParams | None:
    """Returns params of the image tower of `config`, drawn as the decoder's are; None where it has none."""
    if config.vision is None:
        return None
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _draw(f".vision{jax.tree_util.keystr(path)}", leaf, config, seed),
        vision_param_shapes(config.vision, config.dtype),
    )


def _draw(name: str, leaf: jax.ShapeDtypeStruct | QuantizedWeight, config: ModelConfig, seed: int) -> Weight:
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    mean, std = _distribution(name, leaf, config)
    weight = mean + std * random.standard_normal(leaf.shape)
    if isinstance(leaf, QuantizedWeight):
        return quantize(np.asarray(weight, leaf.dtype))
    return jnp.asarray(weight, leaf.dtype)


def _distribution(
    name: str, leaf: jax.ShapeDtypeStruct | QuantizedWeight, config: ModelConfig
) -> tuple[float, float]:
    if name == ".embedding":
        return 0.0, _TIED_EMBEDDING_STD if config.tie_embeddings else 0.3
    if name == ".lm_head":
        return 0.0, _LOGIT_STD / config.embed_dim**0.5
    if name == ".final_norm":
        tied_gain = _LOGIT_STD / (_TIED_EMBEDDING_STD * config.embed_dim**0.5)
        return tied_gain if config.tie_embeddings else 1.0, 0.2
    if name.endswith(".bias"):
        return 0.0, 0.2
    if name.endswith(".positions"):
        return 0.0, 0.3
    if name.endswith(("_norm", ".norm", ".scale")):
        return 1.0, 0.2
    if name.endswith(".log_rate"):
        return -0.5, 0.8  # with the bias below half of the state is left after one to ten columns
    if name.endswith(".dt_bias"):
        return -1.0, 0.8
    if len(leaf.shape) < 2:
        raise ValueError(f"random_params: no rule says how to draw {name} {leaf.shape}")
    return 0.0, 1.2 / leaf.shape[-1] ** 0.5  # linear weights are [out..., in]
