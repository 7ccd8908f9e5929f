"""Which family reads which `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gemma3, llama, mistral, qwen3, qwen3_5, qwen3_next, qwen3_vl
from jaxinfer.models.config_values import check_values
from jaxinfer.models.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen3.FAMILY,
    qwen3.MOE_FAMILY,
    qwen3_vl.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5.MOE_FAMILY,
    qwen3_5.MULTIMODAL_FAMILY,
    qwen3_5.MULTIMODAL_MOE_FAMILY,
    gemma3.FAMILY,
    gemma3.MULTIMODAL_FAMILY,
)


def family_of(raw: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json dict; ValueError when none reads its model_type, or a value in it
    is one that no model has."""
    check_values(raw)
    model_type = raw.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = sorted(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"config.json has model_type {model_type!r}; known are {known}")
