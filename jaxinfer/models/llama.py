"""Llama and its kin: SmolLM2 and every checkpoint of model_type "llama"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import LayerConfig, LayerKind, ModelConfig
from jaxinfer.models.config_reading import activation, head_dim, read_rope, require, token_ids
from jaxinfer.models.family import Family


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a Llama checkpoint; ValueError for what this decoder does not do."""
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise ValueError(f"config.json has {name}=true: biases are not supported")
    layer = LayerConfig(LayerKind.FULL_ATTENTION, rope=read_rope(raw))
    heads = require(raw, "num_attention_heads")
    return ModelConfig(
        family="llama",
        vocab_size=require(raw, "vocab_size"),
        embed_dim=require(raw, "hidden_size"),
        mlp_dim=require(raw, "intermediate_size"),
        num_q_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim(raw),
        layers=(layer,) * require(raw, "num_hidden_layers"),
        max_positions=require(raw, "max_position_embeddings"),
        norm_eps=require(raw, "rms_norm_eps"),
        softmax_scale=head_dim(raw) ** -0.5,
        activation=activation(raw, "silu"),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
    )


FAMILY = Family(model_types=("llama",), read_config=read_config)
