"""Messages as prompt text, in which nobody's words are control tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.models import Model
from jaxinfer.models.model import Tokenizer

_NOT_WORDS = ("role", "type")


def chat_text(model: Model, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Returns messages as the model's chat template writes them, for `Tokenizer.encode_rendered`.

    What a message says is guarded (`Tokenizer.guard`): a control token that is spelled in it is encoded as
    the text that it is. Control tokens are the template's alone.

    Args:
      **options: of the template.

    Raises:
      ChatTemplateError: messages that the template refuses.
      ValueError: the model has no chat template.
    """
    if model.chat_template is None:
        raise ValueError("this model has no chat template; give a prompt instead of messages")
    return model.chat_template.render([_guarded(message, model.tokenizer) for message in messages], **options)


def _guarded(value: Any, tokenizer: Tokenizer) -> Any:
    if isinstance(value, str):
        return tokenizer.guard(value)
    if isinstance(value, Mapping):
        return {key: item if key in _NOT_WORDS else _guarded(item, tokenizer) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(item, tokenizer) for item in value]
    return value
