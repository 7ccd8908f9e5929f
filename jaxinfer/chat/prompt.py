"""Conversations as token ids: an answer keeps the ids that were generated for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.models import Model

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Represented:
    """Text and the ids that were fed for it: a rendered prompt and the answer that followed it."""

    text: str
    token_ids: tuple[int, ...]


def prompt_ids(model: Model, text: str, history: Sequence[Represented]) -> list[int]:
    """Returns the ids of a rendered conversation, ready for the model's answer.

    Tokenising text again need not give the ids that made it. So where the rendered conversation begins with
    what an earlier turn has represented, those ids are kept and only the rest is tokenised; where the
    template rewrites history (drops thinking, trims an answer) the text differs and all of it is.
    """
    for earlier in sorted(history, key=lambda turn: len(turn.text), reverse=True):
        if text.startswith(earlier.text):
            ids = [*earlier.token_ids, *model.tokenizer.encode_rendered(text[len(earlier.text) :])]
            # A tokenizer that puts a space in front of any text would put one in the middle of this one.
            if model.tokenizer.decode(ids, skip_special_tokens=False) == text:
                return ids
    return model.tokenizer.encode_rendered(text)


def last_question_start(model: Model, messages: Sequence[Message], text: str, ids: Sequence[int]) -> int:
    """Returns how many of a prompt's ids come before its last message: where an edit of it would go on.

    0 where the template does not render the earlier messages to the beginning of the same text. `text` and
    `ids` are those of `messages`.
    """
    try:
        head = rendered(model, messages[:-1], add_generation_prompt=False)
    except ValueError:  # a template may refuse a conversation that ends there
        return 0
    if not text.startswith(head):
        return 0
    # The ids of earlier answers are their own; the tail was tokenised just now.
    tail = model.tokenizer.encode_rendered(text[len(head) :])
    start = len(ids) - len(tail)
    return start if start > 0 and list(ids[start:]) == tail else 0


def rendered(model: Model, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """Returns the text of a conversation, with what introduces the answer unless that is turned off.

    Raises:
      ChatTemplateError: messages that the template refuses.
    """
    assert model.chat_template is not None  # held by ChatSession
    return model.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
