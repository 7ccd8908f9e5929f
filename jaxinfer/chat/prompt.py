"""Conversations as token ids: an answer keeps the ids that were generated for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.generation.image_prompts import spelled_out
from jaxinfer.generation.messages import chat_text
from jaxinfer.images import ImageError, ImagePrompt, PreparedImage, image_prompt, locate_images
from jaxinfer.images.prompt import Span
from jaxinfer.models import Model

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Represented:
    """Text and the ids that were fed for it: a rendered prompt and the answer that followed it.

    Attributes:
      text: as rendered: placeholders written out, breaks where somebody spelled a control token.
      token_ids: what was fed.
      content: (start, end, digest) of the images among them.
    """

    text: str
    token_ids: tuple[int, ...]
    content: tuple[Span, ...] = ()


def question_of(text: str, num_images: int) -> Message:
    """Returns a user's message: its images come before its text."""
    if not num_images:
        return {"role": "user", "content": text}
    parts = [{"type": "image"}] * num_images
    return {"role": "user", "content": [*map(dict, parts), {"type": "text", "text": text}]}


def text_of(message: Message) -> str:
    """Returns the text of a message, without its images."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")


def prompt_of(
    model: Model, text: str, history: Sequence[Represented], images: Sequence[PreparedImage] = ()
) -> ImagePrompt:
    """Returns the ids of a rendered conversation, ready for the model's answer.

    Tokenising text again need not give the ids that made it. So where the rendered conversation begins with
    what an earlier turn has represented, those ids are kept and only the rest is tokenised; where the
    template rewrites history (drops thinking, trims an answer) the text differs and all of it is.

    Args:
      images: of the whole conversation, in order.
    """
    tokenizer, plain = model.tokenizer, model.tokenizer.unguard(text)
    digests = [image.digest for image in images]
    for earlier in sorted(history, key=lambda turn: len(turn.text), reverse=True):
        kept = len(earlier.content)
        same_images = digests[:kept] == [digest for _, _, digest in earlier.content]
        if same_images and text.startswith(earlier.text):
            tail = tokenizer.encode_rendered(text[len(earlier.text) :])
            ids = [*earlier.token_ids, *tail]
            # A tokenizer that puts a space in front of any text would put one in the middle of this one.
            if tokenizer.decode(ids, skip_special_tokens=False) == plain:
                content = earlier.content
                if images:  # what an answer made up is no image: only the rest is looked through
                    content += _located(model, tail, images[kept:], len(earlier.token_ids))
                return image_prompt(ids, images, config=model.config, content=content)
    return image_prompt(tokenizer.encode_rendered(text), images, config=model.config)


def _located(
    model: Model, ids: Sequence[int], images: Sequence[PreparedImage], offset: int
) -> tuple[Span, ...]:
    assert model.config.image_token_id is not None  # held by read_images
    return locate_images(ids, images, image_token_id=model.config.image_token_id, offset=offset)


def last_question_start(text: str, head: str, ids: Sequence[int], model: Model) -> int:
    """Returns how many of a prompt's ids come before its last message: where an edit of it would go on.

    0 where the template does not render the earlier messages to the beginning of the same text.

    Args:
      text, ids: of the conversation.
      head: its text without the last message, "" where the template refuses that.
    """
    if not head or not text.startswith(head):
        return 0
    # The ids of earlier answers are their own; the tail was tokenised just now.
    tail = model.tokenizer.encode_rendered(text[len(head) :])
    start = len(ids) - len(tail)
    return start if start > 0 and list(ids[start:]) == tail else 0


def rendered(
    model: Model,
    messages: Sequence[Message],
    images: Sequence[PreparedImage] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Returns the text of a conversation, with what introduces the answer unless that is turned off.

    Raises:
      ChatTemplateError: messages that the template refuses.
      ImageError: the template wrote not as many placeholders as there are images.
    """
    text = chat_text(model, messages, add_generation_prompt=add_generation_prompt)
    try:
        return spelled_out(model, text, images)
    except ImageError as error:
        raise ImageError(f"the conversation as the chat template wrote it: {error}") from None


def rendered_before(model: Model, messages: Sequence[Message], images: Sequence[PreparedImage]) -> str:
    """Returns the text of a conversation that ends there, without an introduction; "" where the template
    refuses it."""
    try:
        return rendered(model, messages, images, add_generation_prompt=False)
    except ValueError:
        return ""
