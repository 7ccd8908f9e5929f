"""Qwen3, dense and with routed experts: Llama with norms on queries and keys and a free head size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig, MoeConfig
from jaxinfer.models.config_reading import attention_layer, layer_types, read_decoder, read_rope, require
from jaxinfer.models.family import Family

# What the published configs may leave out.
_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096}
_DENSE_DEFAULTS = _DEFAULTS | {"head_dim": 128, "max_window_layers": 28}
_MOE_DEFAULTS = _DEFAULTS | {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a dense Qwen3 checkpoint; ValueError for what this decoder does not do."""
    return read_dense(raw, family="qwen3")


def read_dense(
    raw: Mapping[str, Any],
    *,
    family: str,
    default_section: tuple[int, int, int] | None = None,
    **options: Any,
) -> ModelConfig:
    """Returns the config of a dense decoder of Qwen3's shape.

    Args:
      default_section: of three-axis rope, where the config names none.
      options: fields of `ModelConfig`, as for `read_decoder`.
    """
    raw = {**_DENSE_DEFAULTS, **raw}
    window = _window(raw)
    first_sliding = require(raw, "max_window_layers")
    full, sliding = LayerKind.FULL_ATTENTION.value, LayerKind.SLIDING_ATTENTION.value
    default = [
        sliding if window and index >= first_sliding else full
        for index in range(require(raw, "num_hidden_layers"))
    ]
    rope = read_rope(raw, default_section=default_section)
    layers = tuple(
        attention_layer(rope, window if name == sliding else None) for name in layer_types(raw, default)
    )
    return read_decoder(raw, family=family, layers=layers, qk_norm=True, **options)


def read_moe_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a Qwen3 mixture of experts; its window, where it has one, is every layer's."""
    raw = {**_MOE_DEFAULTS, **raw}
    rope, window = read_rope(raw), _window(raw)
    layers = tuple(
        attention_layer(rope, window, mlp="moe" if is_routed(raw, index) else "dense")
        for index in range(require(raw, "num_hidden_layers"))
    )
    return read_decoder(raw, family="qwen3_moe", layers=layers, qk_norm=True, moe=read_experts(raw))


def is_routed(raw: Mapping[str, Any], index: int) -> bool:
    """True when layer `index` has routed experts: every `decoder_sparse_step`-th, less `mlp_only_layers`."""
    on_step = (index + 1) % require(raw, "decoder_sparse_step") == 0
    return on_step and index not in (raw.get("mlp_only_layers") or ())


def read_experts(raw: Mapping[str, Any]) -> MoeConfig:
    """Returns the sizes of the routed experts."""
    count = raw.get("num_local_experts") or require(raw, "num_experts")
    chosen = require(raw, "num_experts_per_tok")
    if chosen > count:
        raise ValueError(f"config.json has num_experts_per_tok={chosen} of {count} experts")
    return MoeConfig(
        num_experts=count,
        num_experts_per_token=chosen,
        mlp_dim=require(raw, "moe_intermediate_size"),
        normalize_weights=bool(raw.get("norm_topk_prob", True)),
    )


def _window(raw: Mapping[str, Any]) -> int | None:
    return raw["sliding_window"] if raw["use_sliding_window"] else None


FAMILY = Family(model_types=("qwen3",), read_config=read_config)
MOE_FAMILY = Family(model_types=("qwen3_moe",), read_config=read_moe_config)
