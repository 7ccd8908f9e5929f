"""Requests as token ids, checked against the model."""

from __future__ import annotations

import dataclasses
import datetime

from jaxinfer.batch.request import BadRow, Request
from jaxinfer.generation.rows import RowOptions
from jaxinfer.models import Model

DEFAULT_NEW_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Row:
    """A request that can be answered."""

    request: Request
    token_ids: tuple[int, ...]
    options: RowOptions

    @property
    def num_positions(self) -> int:
        """The positions that prompt and answer may take."""
        return len(self.token_ids) + self.options.max_new_tokens


def encode_request(
    model: Model, request: Request, *, max_positions: int, now: datetime.datetime
) -> Row | BadRow:
    """Returns the row of a request, or why there is none.

    Args:
      max_positions: that a row may have, by the model and by the memory there is.
      now: what a chat template that writes the date is told: the same for all of a job, whenever it goes on.
    """
    try:
        token_ids = _token_ids(model, request, now)
    except ValueError as error:
        return _bad(request, " ".join(str(error).split()))
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
    return Row(
        request, tuple(token_ids), RowOptions(wanted, request.sampling, request.stop, request.logprobs)
    )


def _bad(request: Request, error: str) -> BadRow:
    return BadRow(request.id, request.line, error)


def _token_ids(model: Model, request: Request, now: datetime.datetime) -> list[int]:
    if request.messages is None:
        assert request.prompt is not None
        return model.tokenizer.encode(request.prompt)
    if model.chat_template is None:
        raise ValueError("this model has no chat template; give a prompt instead of messages")
    text = model.chat_template.render(request.messages, strftime_now=now.strftime)
    return model.tokenizer.encode_rendered(text)
