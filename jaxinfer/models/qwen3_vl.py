"""Qwen3-VL, dense: Qwen3 with interleaved three-axis rope, and a tower that feeds the first layers too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.config_reading import require, token_ids
from jaxinfer.models.family import Family
from jaxinfer.models.qwen3 import read_dense
from jaxinfer.models.qwen3_5 import VISION_PREFIXES
from jaxinfer.models.vision.config_reading import read_qwen_vl

_DEFAULT_IMAGE_TOKEN_ID = 151_655
_DEFAULT_SECTION = (24, 20, 20)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of an image and text checkpoint; ValueError for what this library does not do."""
    text = require(raw, "text_config")
    outer = {key: raw.get(key) for key in ("model_type", "quantization_config")}
    image_token_id = raw.get("image_token_id")
    return read_dense(
        {**text, **outer},
        family="qwen3_vl",
        default_section=_DEFAULT_SECTION,
        tie_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        eos_token_ids=token_ids(raw.get("eos_token_id"), text.get("eos_token_id")),
        vision=read_qwen_vl(raw, has_deepstack=True),
        image_token_id=_DEFAULT_IMAGE_TOKEN_ID if image_token_id is None else image_token_id,
    )


FAMILY = Family(model_types=("qwen3_vl",), read_config=read_config, vision_prefixes=VISION_PREFIXES)
