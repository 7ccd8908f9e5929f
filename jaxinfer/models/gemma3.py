"""Gemma 3: five sliding layers to each full one, norms around both parts, two ropes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import LayerConfig, LayerKind, ModelConfig
from jaxinfer.models.config_reading import (
    attention_layer,
    layer_types,
    read_decoder,
    read_rope,
    refuse,
    require,
    token_ids,
)
from jaxinfer.models.family import Family
from jaxinfer.models.vision.config_reading import read_siglip
from jaxinfer.spans import MaskPolicy

# What the published configs leave out.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_DEFAULT_PATTERN = 6
_FULL_THETA, _SLIDING_THETA = 1_000_000.0, 10_000.0
_DEFAULT_IMAGE_TOKEN_ID = 262_144

VISION_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a text-only checkpoint; ValueError for what this decoder does not do."""
    return _read_text(raw, MaskPolicy.CAUSAL)


def read_multimodal_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the decoder's config of an image and text checkpoint: `text_config`, with image runs that
    are read in both directions."""
    text = require(raw, "text_config")
    image_token_id = raw.get("image_token_index", raw.get("image_token_id"))
    return _read_text(
        {**text, **{key: raw.get(key) for key in ("model_type", "quantization_config")}},
        MaskPolicy.VISION_BIDIRECTIONAL,
        # transformers applies the cap in Gemma3ForCausalLM only.
        final_logit_soft_cap=None,
        tie_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", True))),
        eos_token_ids=token_ids(raw.get("eos_token_id"), text.get("eos_token_id", _DEFAULTS["eos_token_id"])),
        vision=read_siglip(raw),
        image_token_id=_DEFAULT_IMAGE_TOKEN_ID if image_token_id is None else image_token_id,
    )


def _read_text(raw: Mapping[str, Any], policy: MaskPolicy, **options: Any) -> ModelConfig:
    raw = {**_DEFAULTS, **raw}
    refuse(raw, {"use_bidirectional_attention": "attention to later text is"})
    common = {
        "softmax_scale": require(raw, "query_pre_attn_scalar") ** -0.5,
        "scale_embeddings": True,
        "qk_norm": True,
        "post_norms": True,
        # `attn_logit_softcapping` is stored by some checkpoints but no Gemma 3 applies it.
        "final_logit_soft_cap": raw.get("final_logit_softcapping"),
    }
    return read_decoder(raw, family="gemma3", layers=_layers(raw, policy), **(common | options))


def _layers(raw: Mapping[str, Any], policy: MaskPolicy) -> tuple[LayerConfig, ...]:
    full, sliding = LayerKind.FULL_ATTENTION.value, LayerKind.SLIDING_ATTENTION.value
    # In the legacy layout the scaling is the full layers' alone.
    legacy = {"rope_theta": raw.get("rope_local_base_freq")}
    of_type = {
        full: attention_layer(read_rope(raw, layer_type=full, default_theta=_FULL_THETA), mask_policy=policy),
        sliding: attention_layer(
            read_rope(raw, layer_type=sliding, legacy=legacy, default_theta=_SLIDING_THETA),
            raw["sliding_window"],
            policy,
        ),
    }
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or _DEFAULT_PATTERN
    num_layers = require(raw, "num_hidden_layers")
    default = [full if (index + 1) % pattern == 0 else sliding for index in range(num_layers)]
    return tuple(of_type[name] for name in layer_types(raw, default))


FAMILY = Family(model_types=("gemma3_text",), read_config=read_config, norm_scale_offset=1.0)
MULTIMODAL_FAMILY = Family(
    model_types=("gemma3",),
    read_config=read_multimodal_config,
    norm_scale_offset=1.0,
    vision_prefixes=VISION_PREFIXES,
)
