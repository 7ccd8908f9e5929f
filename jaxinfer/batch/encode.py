"""Requests as token ids, checked against the model."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.batch.request import BadRow, Request
from jaxinfer.generation.image_features import prepare_images
from jaxinfer.generation.image_prompts import spelled_out
from jaxinfer.generation.messages import chat_text
from jaxinfer.generation.rows import RowOptions
from jaxinfer.images import ImagePrompt, PreparedImage, image_prompt
from jaxinfer.models import Model

DEFAULT_NEW_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Row:
    """A request that can be answered."""

    request: Request
    token_ids: tuple[int, ...]
    options: RowOptions
    prompt: ImagePrompt | None = None  # the same ids with their images; None: there are none

    @property
    def num_positions(self) -> int:
        """The positions that prompt and answer may take."""
        return len(self.token_ids) + self.options.max_new_tokens


def encode_request(
    model: Model,
    request: Request,
    *,
    max_positions: int,
    now: datetime.datetime,
    folder: Path = Path(),
) -> Row | BadRow:
    """Returns the row of a request, or why there is none.

    Args:
      max_positions: that a row may have, by the model and by the memory there is.
      now: what a chat template that writes the date is told: the same for all of a job, whenever it goes on.
      folder: what the paths of images are relative to.
    """
    try:
        prompt = _prompt(model, request, now, read_row_images(model, request, folder))
    except ValueError as error:
        return _bad(request, " ".join(str(error).split()))
    token_ids = prompt.token_ids
    if not token_ids:
        return _bad(request, "the prompt has no tokens; an empty prompt cannot be continued")
    beyond = next((token for token in token_ids if not 0 <= token < model.config.vocab_size), None)
    if beyond is not None:
        return _bad(request, f"the prompt has token id {beyond}, which the model has no embedding for")
    limit = min(max_positions, model.config.max_positions)
    wanted = request.max_new_tokens
    if wanted is None:
        wanted = max(1, min(DEFAULT_NEW_TOKENS, limit - len(token_ids)))
    if len(token_ids) + wanted > limit:
        whose = "the model's" if limit == model.config.max_positions else "the memory limit's"
        return _bad(
            request,
            f"the prompt has {len(token_ids)} tokens, and max_new_tokens={wanted} more exceed "
            f"{whose} {limit} positions",
        )
    options = RowOptions(wanted, request.sampling, request.stop, request.logprobs)
    return Row(request, token_ids, options, prompt if prompt.content else None)


def read_row_images(model: Model, request: Request, folder: Path) -> tuple[PreparedImage, ...]:
    """Returns the images of a row; ImageError where one cannot be taken."""
    return prepare_images(model, [folder / path for path in request.images])


def _bad(request: Request, error: str) -> BadRow:
    return BadRow(request.id, request.line, error)


def _prompt(
    model: Model, request: Request, now: datetime.datetime, images: Sequence[PreparedImage]
) -> ImagePrompt:
    """Returns the ids of a request: a model of text alone, or a row without images, leaves prompts as they
    are."""
    if request.messages is not None:
        # Control tokens are the template's alone, so every placeholder stands for an image.
        text = spelled_out(model, chat_text(model, request.messages, strftime_now=now.strftime), images)
        return image_prompt(model.tokenizer.encode_rendered(text), images, config=model.config)
    assert request.prompt is not None
    text = spelled_out(model, request.prompt, images) if images else request.prompt
    return image_prompt(model.tokenizer.encode(text), images, config=model.config)
