"""Qwen3-Next: three Gated DeltaNet layers to each full one, gated attention, routed and shared experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.config import GatedDeltaConfig, LayerConfig, LayerKind, ModelConfig, MoeConfig
from jaxinfer.models.config_reading import attention_layer, layer_types, read_decoder, read_rope, require
from jaxinfer.models.family import Family
from jaxinfer.models.qwen3 import is_routed, read_experts

_KINDS = (LayerKind.GATED_DELTA, LayerKind.FULL_ATTENTION)
_DEFAULT_INTERVAL = 4

# What the published configs may leave out.
_DELTA_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_DEFAULTS = {"decoder_sparse_step": 1, "mlp_only_layers": None}

# Heads for multi-token prediction, which decoding does not use.
IGNORED_PREFIXES = ("mtp.",)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a Qwen3-Next checkpoint; ValueError for what this decoder does not do."""
    raw = {**_DEFAULTS, **raw}
    routed = [is_routed(raw, index) for index in range(require(raw, "num_hidden_layers"))]
    experts = read_shared_experts(raw) if any(routed) else None
    return read_hybrid(raw, family="qwen3_next", routed=routed, moe=experts)


def read_hybrid(
    raw: Mapping[str, Any],
    *,
    family: str,
    routed: list[bool],
    moe: MoeConfig | None,
    default_section: tuple[int, int, int] | None = None,
    **options: Any,
) -> ModelConfig:
    """Returns the config of a decoder that mixes Gated DeltaNet layers with gated full attention.

    Args:
      routed: whether each layer has routed experts.
      default_section: of three-axis rope, where the config names none.
      options: fields of `ModelConfig`, as for `read_decoder`.
    """
    raw = {**_DELTA_DEFAULTS, **raw}
    interval = raw.get("full_attention_interval") or _DEFAULT_INTERVAL
    default = [_KINDS[(index + 1) % interval == 0].value for index in range(len(routed))]
    names = layer_types(raw, default, known=_KINDS)
    full = attention_layer(read_rope(raw, default_section=default_section))
    recurrent = LayerConfig(LayerKind.GATED_DELTA)
    layers = tuple(
        dataclasses.replace(
            full if name == LayerKind.FULL_ATTENTION.value else recurrent, mlp="moe" if is_moe else "dense"
        )
        for name, is_moe in zip(names, routed, strict=True)
    )
    return read_decoder(
        raw,
        family=family,
        layers=layers,
        qk_norm=True,
        attention_gate=True,
        moe=moe,
        gated_delta=_read_sizes(raw) if recurrent.kind.value in names else None,
        **options,
    )


def read_shared_experts(raw: Mapping[str, Any]) -> MoeConfig:
    """Returns the sizes of the routed experts, and of the one that every token goes through."""
    return dataclasses.replace(
        read_experts(raw), shared_mlp_dim=require(raw, "shared_expert_intermediate_size")
    )


def _read_sizes(raw: Mapping[str, Any]) -> GatedDeltaConfig:
    return GatedDeltaConfig(
        num_key_heads=require(raw, "linear_num_key_heads"),
        num_value_heads=require(raw, "linear_num_value_heads"),
        key_head_dim=require(raw, "linear_key_head_dim"),
        value_head_dim=require(raw, "linear_value_head_dim"),
        conv_width=require(raw, "linear_conv_kernel_dim"),
    )


FAMILY = Family(
    model_types=("qwen3_next",),
    read_config=read_config,
    norm_scale_offset=1.0,
    ignored_prefixes=IGNORED_PREFIXES,
)
