"""Reading `config.json`: values that must be there, layer patterns, and rope in both layouts.

The v5 layout nests rope in `rope_parameters` (flat, or one entry a layer type); the legacy layout spreads
`rope_theta`, `rope_scaling` and `rope_local_base_freq`. Where both are present the nested value wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import LayerConfig, LayerKind, ModelConfig, RopeConfig
from jaxinfer.spans import MaskPolicy

_LINEAR_KEYS = ("factor",)
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def require(raw: Mapping[str, Any], name: str) -> Any:
    """Returns `raw[name]`; ValueError when it is missing or null."""
    value = raw.get(name)
    if value is None:
        raise ValueError(f"config.json of model_type {raw.get('model_type')!r} lacks {name!r}")
    return value


def refuse(raw: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raises ValueError when `raw` sets one of the keys of `reasons`; the value says what it would need."""
    for name, reason in reasons.items():
        if raw.get(name):
            raise ValueError(
                f"config.json of model_type {raw.get('model_type')!r} has {name}="
                f"{_brief(raw[name])}: {reason} not supported"
            )


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return repr(value.get("quant_method", "{...}"))
    return repr(value)


def token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """Returns the distinct token ids among a config's ids, lists of ids and nulls, in order."""
    listed = [value if isinstance(value, list) else [] if value is None else [value] for value in values]
    return tuple(dict.fromkeys(token_id for part in listed for token_id in part))


def head_dim(raw: Mapping[str, Any]) -> int:
    """Returns `head_dim`, or hidden size over heads where a config leaves it out."""
    return raw.get("head_dim") or require(raw, "hidden_size") // require(raw, "num_attention_heads")


def activation(raw: Mapping[str, Any], default: str) -> str:
    """Returns the MLP's activation, "silu" or "gelu_tanh"; ValueError for one that is not known."""
    name = raw.get("hidden_activation") or raw.get("hidden_act") or default
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in known:
        raise ValueError(f"config.json has activation {name!r}; known are {sorted(known)}")
    return known[name]


def read_decoder(
    raw: Mapping[str, Any], *, family: str, layers: tuple[LayerConfig, ...], **options: Any
) -> ModelConfig:
    """Returns the float32 config of a decoder from the keys that all families share.

    Args:
      options: fields of `ModelConfig` that differ from those keys' plain reading.

    Raises:
      ValueError: a key that must be there is not, or one asks for what this decoder does not do.
    """
    refuse(
        raw,
        {
            "attention_bias": "biases are",
            "mlp_bias": "biases are",
            "quantization_config": "quantised safetensors are",
        },
    )
    heads = require(raw, "num_attention_heads")
    shared = {
        "vocab_size": require(raw, "vocab_size"),
        "embed_dim": require(raw, "hidden_size"),
        "mlp_dim": require(raw, "intermediate_size"),
        "num_q_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim(raw),
        "max_positions": require(raw, "max_position_embeddings"),
        "norm_eps": require(raw, "rms_norm_eps"),
        "softmax_scale": head_dim(raw) ** -0.5,
        "activation": activation(raw, "silu"),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_ids": token_ids(raw.get("eos_token_id")),
    }
    return ModelConfig(family=family, layers=layers, **(shared | options))


def attention_layer(
    rope: RopeConfig,
    window: int | None = None,
    mask_policy: MaskPolicy = MaskPolicy.CAUSAL,
    **options: Any,
) -> LayerConfig:
    """Returns an attention layer that slides where it has a window; a window of 0 is none."""
    kind = LayerKind.SLIDING_ATTENTION if window else LayerKind.FULL_ATTENTION
    return LayerConfig(kind, window=window or None, mask_policy=mask_policy, rope=rope, **options)


def layer_types(
    raw: Mapping[str, Any],
    default: list[str],
    known: tuple[LayerKind, ...] = (LayerKind.FULL_ATTENTION, LayerKind.SLIDING_ATTENTION),
) -> list[str]:
    """Returns `layer_types`, one name a layer, or `default` where the config leaves them out.

    Raises:
      ValueError: not one name a layer, or a name of a kind that is not in `known`.
    """
    names = raw.get("layer_types")
    names = default if names is None else names
    num_layers = require(raw, "num_hidden_layers")
    if len(names) != num_layers:
        raise ValueError(f"config.json has {len(names)} layer_types for {num_layers} layers")
    known_names = [kind.value for kind in known]
    if unknown := sorted(set(names) - set(known_names)):
        raise ValueError(
            f"config.json of model_type {raw.get('model_type')!r} has layer_types {unknown}; known are "
            f"{known_names}"
        )
    return list(names)


def read_rope(
    raw: Mapping[str, Any],
    *,
    layer_type: str | None = None,
    legacy: Mapping[str, Any] | None = None,
    default_theta: float = 10000.0,
    default_section: tuple[int, int, int] | None = None,
) -> RopeConfig:
    """Returns the rope of a layer.

    Args:
      layer_type: for families whose rope differs by layer type: the key in a nested `rope_parameters`.
      legacy: what the legacy layout says of this layer; None: `rope_theta` and `rope_scaling`.
      default_theta, default_section: where the config names none; a section makes the rope three-axis.

    Raises:
      ValueError: an unknown rope type, a scaling that lacks a value, or `rope_parameters` by layer type
        where the family has one rope, and the reverse.
    """
    nested = raw.get("rope_parameters") or {}
    by_type = any(isinstance(value, Mapping) for value in nested.values())
    if nested and by_type != (layer_type is not None):
        wanted = "flat" if layer_type is None else "one entry a layer type"
        raise ValueError(
            f"config.json of model_type {raw.get('model_type')!r} has rope_parameters {sorted(nested)}; "
            f"expected {wanted}"
        )
    if layer_type is not None:
        nested = nested.get(layer_type) or {}
    if legacy is None:
        legacy = {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    values = {**legacy, **{name: value for name, value in nested.items() if value is not None}}
    theta = values.get("rope_theta")
    kind = values.get("rope_type") or values.get("type") or "default"
    partial = values.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    section = values.get("mrope_section") or default_section
    if section and len(section) != 3:
        raise ValueError(f"config.json has mrope_section={section}; it must have one size an axis: T, H, W")
    return RopeConfig(
        theta=float(default_theta if theta is None else theta),
        rotary_dim=int(head_dim(raw) * partial),
        mrope_section=(section[0], section[1], section[2]) if section else None,
        **_scaling(kind, values),
    )


def _scaling(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if kind in ("default", "mrope"):
        return {}
    keys = {"linear": _LINEAR_KEYS, "llama3": _LLAMA3_KEYS}.get(kind)
    if keys is None:
        raise ValueError(f"config.json has rope_type {kind!r}; known are 'default', 'linear', 'llama3'")
    missing = [key for key in keys if values.get(key) is None]
    if missing:
        raise ValueError(f"config.json has rope_type {kind!r} without {missing}")
    scaling = {"scaling": kind, "factor": float(values["factor"])}
    if kind == "llama3":
        scaling["low_freq_factor"] = float(values["low_freq_factor"])
        scaling["high_freq_factor"] = float(values["high_freq_factor"])
        scaling["original_max_positions"] = int(values["original_max_position_embeddings"])
    return scaling
