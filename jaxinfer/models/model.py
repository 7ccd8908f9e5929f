"""A loaded model: everything that text in and text out need, as one immutable value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxinfer.config import ModelConfig
from jaxinfer.models.params import DecoderParams
from jaxinfer.models.vision.params import VisionParams
from jaxinfer.state import KvWindowPolicy


class Tokenizer(Protocol):
    """Text to token ids and back; `jaxinfer.loading.Tokenizer` is the one that checkpoints give."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def fingerprint(self) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def encode_rendered(self, text: str) -> list[int]: ...
    def guard(self, text: str) -> str: ...
    def unguard(self, text: str) -> str: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def stream_decoder(self, *, skip_special_tokens: bool = True) -> Any: ...


class ChatTemplate(Protocol):
    """Messages to prompt text; `jaxinfer.loading.ChatTemplate` is the one that checkpoints give."""

    @property
    def fingerprint(self) -> str: ...
    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str: ...


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and what belongs to it.

    Attributes:
      config: what drives the decoder.
      params: its weights.
      tokenizer: text to ids and back.
      chat_template: None for a base model.
      fingerprint: content hash of weights and config.
      kv_window: whether sliding layers of its states drop rows behind their window.
      vision: weights of its image tower, which `config.vision` describes; None for a text model.
    """

    config: ModelConfig
    params: DecoderParams = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    chat_template: ChatTemplate | None = dataclasses.field(repr=False)
    fingerprint: str
    kv_window: KvWindowPolicy
    vision: VisionParams | None = dataclasses.field(default=None, repr=False)
