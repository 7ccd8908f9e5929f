"""Llama and its kin: SmolLM2 and every checkpoint of model_type "llama"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.config_reading import attention_layer, read_decoder, read_rope, require
from jaxinfer.models.family import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a Llama checkpoint; ValueError for what this decoder does not do."""
    layer = attention_layer(read_rope(raw))
    return read_decoder(raw, family="llama", layers=(layer,) * require(raw, "num_hidden_layers"))


FAMILY = Family(model_types=("llama",), read_config=read_config)
