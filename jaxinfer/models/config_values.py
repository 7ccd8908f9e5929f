"""What a `config.json` may hold under the keys that decide sizes: numbers of the right kind and size.

Checked before anything is computed from them: a count of 10**9 layers or of "3" must be an error that names
the key, not a list that fills the memory or an error about Python types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_MAX_COUNT = 2**31 - 1
_MAX_LAYERS = 10_000
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window_pattern",
    # Of image towers.
    "num_heads",
    "image_size",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "out_hidden_size",
    "num_position_embeddings",
    "in_channels",
    "num_channels",
    "mm_tokens_per_image",
)
_REALS = ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "layer_norm_eps")
_MAPPINGS = ("text_config", "vision_config", "preprocessor_config", "rope_parameters", "rope_scaling")


def check_values(raw: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the key, for a value that no model has; null is as good as absent.

    Looks into `text_config` and `vision_config` too.
    """
    for name in _COUNTS:
        _check(raw, name, _is_count(raw.get(name), 1, _MAX_COUNT), "an integer of at least 1")
    wanted = f"an integer in 1..{_MAX_LAYERS}"
    for name in ("num_hidden_layers", "depth"):
        _check(raw, name, _is_count(raw.get(name), 1, _MAX_LAYERS), wanted)
    window = _is_count(raw.get("sliding_window"), 0, _MAX_COUNT)
    _check(raw, "sliding_window", window, "an integer of at least 0, or null")
    for name in _REALS:
        _check(raw, name, _is_positive(raw.get(name)), "a positive finite number")
    for name in _MAPPINGS:
        _check(raw, name, isinstance(raw.get(name), Mapping), "an object")
    ends = raw.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [ends]
    _check(raw, "eos_token_id", all(_is_count(i, 0, _MAX_COUNT) for i in listed), "an id or a list of ids")
    for part in ("text_config", "vision_config"):
        if isinstance(raw.get(part), Mapping):
            check_values(raw[part])


def _check(raw: Mapping[str, Any], name: str, is_right: bool, wanted: str) -> None:
    if raw.get(name) is not None and not is_right:
        raise ValueError(f"config.json: {name} must be {wanted}; got {raw[name]!r}")


def _is_count(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
