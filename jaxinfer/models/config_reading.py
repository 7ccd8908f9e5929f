"""Reading `config.json`: values that must be there, and rope in both layouts.

The v5 layout nests rope in `rope_parameters` (flat, or one entry a layer type); the legacy layout spreads
`rope_theta`, `rope_scaling` and `rope_local_base_freq`. Where both are present the nested value wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import RopeConfig

_LINEAR_KEYS = ("factor",)
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def require(raw: Mapping[str, Any], name: str) -> Any:
    """Returns `raw[name]`; ValueError when it is missing or null."""
    value = raw.get(name)
    if value is None:
        raise ValueError(f"config.json of model_type {raw.get('model_type')!r} lacks {name!r}")
    return value


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns a config's token id, list of ids or null as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


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


def read_rope(
    raw: Mapping[str, Any], *, layer_type: str | None = None, default_theta: float = 10000.0
) -> RopeConfig:
    """Returns the rope of a layer.

    Args:
      layer_type: for families whose rope differs by layer type: the key in a nested `rope_parameters`.
      default_theta: where the config names none.

    Raises:
      ValueError: an unknown rope type, or a scaling that lacks a value.
    """
    nested = raw.get("rope_parameters") or {}
    if layer_type is not None and isinstance(nested.get(layer_type), Mapping):
        nested = nested[layer_type]
    values = {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {}), **nested}
    theta = values.get("rope_theta")
    kind = values.get("rope_type") or values.get("type") or "default"
    partial = values.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    section = values.get("mrope_section")
    return RopeConfig(
        theta=float(default_theta if theta is None else theta),
        rotary_dim=int(head_dim(raw) * partial),
        mrope_section=tuple(section) if section else None,
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
