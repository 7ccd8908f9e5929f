"""Entries and metadata of a toy model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxinfer.prefix import PrefixEntry, PrefixMetadata

METADATA = PrefixMetadata(
    model_fingerprint="weights and config",
    tokenizer_fingerprint="vocabulary",
    adapter_fingerprint=None,
    vocab_size=100,
    capacity=32,
    kv_dtype="float32",
    rope_theta=1e4,
    partial_rotary_factor=None,
    layer_pattern="global,global",
    chat_template_fingerprint="template",
    mask_policy="causal",
    kv_window="off",
)
BIDIRECTIONAL = dataclasses.replace(METADATA, mask_policy=("causal", "vision_bidirectional"))


def entry_of(token_ids: Sequence[int], *, metadata: PrefixMetadata = METADATA, **fields) -> PrefixEntry:
    """An entry of slot 0 that represents exactly these tokens."""
    return PrefixEntry(0, metadata, token_ids, len(token_ids), **fields)
