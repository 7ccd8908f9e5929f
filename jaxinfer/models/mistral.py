"""Mistral: Llama with one attention window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.config_reading import attention_layer, read_decoder, read_rope, refuse, require
from jaxinfer.models.family import Family

_DEFAULT_WINDOW = 4096  # where the key is absent; null means that every layer reads all keys


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a Mistral checkpoint; ValueError for what this decoder does not do."""
    refuse(raw, {"layer_types": "a Mistral whose layers differ is"})
    layer = attention_layer(read_rope(raw), raw.get("sliding_window", _DEFAULT_WINDOW))
    return read_decoder(raw, family="mistral", layers=(layer,) * require(raw, "num_hidden_layers"))


FAMILY = Family(model_types=("mistral",), read_config=read_config)
