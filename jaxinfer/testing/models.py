"""A tiny model, whole."""

from __future__ import annotations

import hashlib
from typing import Any

from jaxinfer.models import Model
from jaxinfer.state import KvWindowPolicy
from jaxinfer.testing.configs import tiny_config
from jaxinfer.testing.params import random_params, random_vision_params
from jaxinfer.testing.templates import toy_chat_template
from jaxinfer.testing.tokenizer import toy_tokenizer


def tiny_model(
    family: str = "llama", *, seed: int = 0, kv_window: KvWindowPolicy | None = None, **config: Any
) -> Model:
    """Returns a random model with the toy tokenizer and a chat template; Gemma's families have Gemma's rules.

    Args:
      family: one of `TINY_FAMILIES`.
      seed: of the weights.
      kv_window: None: off.
      **config: what `tiny_config` takes besides.
    """
    model_config = tiny_config(family, **config)
    is_gemma = model_config.family == "gemma3"
    return Model(
        config=model_config,
        params=random_params(model_config, seed),
        tokenizer=toy_tokenizer(adds_bos=is_gemma),
        chat_template=toy_chat_template("gemma" if is_gemma else "chatml"),
        fingerprint=hashlib.sha256(f"{model_config} {seed}".encode()).hexdigest(),
        kv_window=KvWindowPolicy.off() if kv_window is None else kv_window,
        vision=random_vision_params(model_config, seed),
    )
