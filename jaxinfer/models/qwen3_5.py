"""Qwen3.5 (and 3.6): Qwen3-Next's layers with interleaved three-axis rope, dense or with experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.config_reading import require, token_ids
from jaxinfer.models.family import Family
from jaxinfer.models.qwen3_next import IGNORED_PREFIXES, read_hybrid, read_shared_experts
from jaxinfer.models.vision.config_reading import read_qwen_vl

VISION_PREFIXES = ("model.visual.", "visual.")
_DEFAULT_IMAGE_TOKEN_ID = 248_056
_DEFAULT_SECTION = (11, 11, 10)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a dense text checkpoint; ValueError for what this decoder does not do."""
    return _read_dense(raw)


def read_moe_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a text checkpoint with experts in every layer; ValueError as above."""
    return _read_moe(raw)


def read_multimodal_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the decoder's config of a dense image and text checkpoint: `text_config`."""
    return _read_dense(_text(raw), **_outer(raw))


def read_multimodal_moe_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the decoder's config of an image and text checkpoint with experts: `text_config`."""
    return _read_moe(_text(raw), **_outer(raw))


def _read_dense(raw: Mapping[str, Any], **options: Any) -> ModelConfig:
    routed = [False] * require(raw, "num_hidden_layers")
    return read_hybrid(
        raw, family="qwen3_5", routed=routed, moe=None, default_section=_DEFAULT_SECTION, **options
    )


def _read_moe(raw: Mapping[str, Any], **options: Any) -> ModelConfig:
    experts = read_shared_experts(raw)
    # No layer is dense, so the config names no size for one.
    raw = {"intermediate_size": experts.mlp_dim, **raw}
    routed = [True] * require(raw, "num_hidden_layers")
    return read_hybrid(
        raw, family="qwen3_5_moe", routed=routed, moe=experts, default_section=_DEFAULT_SECTION, **options
    )


def _text(raw: Mapping[str, Any]) -> dict[str, Any]:
    outer = {key: raw.get(key) for key in ("model_type", "quantization_config")}
    return {**require(raw, "text_config"), **outer}


def _outer(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What an image and text config says beside `text_config`."""
    text = require(raw, "text_config")
    image_token_id = raw.get("image_token_id")
    return {
        "tie_embeddings": bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        "eos_token_ids": token_ids(raw.get("eos_token_id"), text.get("eos_token_id")),
        "vision": read_qwen_vl(raw, has_deepstack=False),
        "image_token_id": _DEFAULT_IMAGE_TOKEN_ID if image_token_id is None else image_token_id,
    }


def _family(model_type: str, read_config: Callable[[Mapping[str, Any]], ModelConfig]) -> Family:
    return Family(
        model_types=(model_type,),
        read_config=read_config,
        norm_scale_offset=1.0,
        ignored_prefixes=IGNORED_PREFIXES,
        vision_prefixes=VISION_PREFIXES,
    )


FAMILY = _family("qwen3_5_text", read_config)
MOE_FAMILY = _family("qwen3_5_moe_text", read_moe_config)
MULTIMODAL_FAMILY = _family("qwen3_5", read_multimodal_config)
MULTIMODAL_MOE_FAMILY = _family("qwen3_5_moe", read_multimodal_moe_config)
