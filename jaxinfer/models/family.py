"""What a model family has to say beside its config: how its checkpoints spell it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of checkpoint of a model family; the families are the files in this folder.

    Attributes:
      model_types: the `model_type` values of config.json that it reads.
      read_config: from a config.json dict to a float32 `ModelConfig`.
      norm_scale_offset: what to add to stored norm scales to get the full multiplier: 1 for families that
        store w of (1 + w).
      ignored_prefixes: tensors that no part of this library has a use for.
      vision_prefixes: tensors of the image tower.
    """

    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    norm_scale_offset: float = 0.0
    ignored_prefixes: tuple[str, ...] = ()
    vision_prefixes: tuple[str, ...] = ()
