"""What a turn of a conversation leaves: the answer, what it cost, and the ids it stands for."""

from __future__ import annotations

import dataclasses

from jaxinfer.chat.images import ChatImage
from jaxinfer.chat.prompt import Message, Represented, text_of
from jaxinfer.generation import Generation
from jaxinfer.prefix import PrefixRestorePlan


@dataclasses.dataclass(frozen=True)
class Timings:
    """Wall time of one turn.

    Attributes:
      first_token_ms: from the call to the first token.
      total_ms: from the call to the reply.
      tokens_per_second: of the tokens after the first.
    """

    first_token_ms: float
    total_ms: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class Reply:
    """An answer and how it came about.

    Attributes:
      text: the answer.
      plan: what of the earlier state was kept, and why not more.
      timings: wall time.
      generation: ids, finish reason, log-probabilities.
    """

    text: str
    plan: PrefixRestorePlan
    timings: Timings
    generation: Generation


@dataclasses.dataclass(frozen=True)
class Turn:
    """One question and its answer.

    Attributes:
      question, answer: the messages.
      represented: the ids of the conversation up to here; None where they are another tokenizer's.
      reply: how the answer came about; None in a conversation that was loaded.
      images: of the question.
    """

    question: Message
    answer: Message
    represented: Represented | None
    reply: Reply | None
    images: tuple[ChatImage, ...] = ()

    @property
    def text(self) -> str:
        """The question's text."""
        return text_of(self.question)
