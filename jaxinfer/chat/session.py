"""One conversation: each turn reuses what the state of the last one allows, and says what it did."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence

from jaxinfer.chat.prompt import Message, Represented, last_question_start, prompt_ids, rendered
from jaxinfer.chat.turn import Seat, run_turn, seat_bytes
from jaxinfer.generation import Generation, StreamChunk
from jaxinfer.generation.rows import GREEDY, Options
from jaxinfer.models import Model
from jaxinfer.prefix import PrefixRestorePlan, PrefixStore
from jaxinfer.sampling import Sampling


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
    """One question and its answer."""

    question: Message
    answer: Message
    represented: Represented
    reply: Reply


class ChatSession:
    """A conversation with a model.

    A turn that fails or is interrupted leaves the session as it was before the turn.

    Args:
      model: with a chat template.
      capacity: the most tokens of the conversation, answers included.
      store: where the state lives between turns, shared with other sessions under other slots; None: a store
        of its own that holds this session and one turn in flight.
      slot: the session's name in the store.
      checkpoints: the most checkpoints of its history, for models whose state cannot simply be truncated.
      system: a first system message.

    Raises:
      ValueError: a model without a chat template, or a capacity outside 1 to the trained length.
    """

    def __init__(
        self,
        model: Model,
        *,
        capacity: int,
        store: PrefixStore | None = None,
        slot: Hashable = 0,
        checkpoints: int = 3,
        system: str | None = None,
    ):
        if model.chat_template is None:
            raise ValueError(
                "ChatSession(model=...) has no chat template: a base model cannot chat; generate()"
            )
        if not 1 <= capacity <= model.config.max_positions:
            raise ValueError(
                f"ChatSession(capacity=...) must be in 1..{model.config.max_positions}, the trained length; "
                f"got {capacity}"
            )
        self.system: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
        self.turns: tuple[Turn, ...] = ()
        if store is None:
            store = PrefixStore(2 * seat_bytes(model, capacity, checkpoints))
        self.seat = Seat(store, slot, model, capacity, checkpoints)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""
        return (*self.system, *(message for turn in self.turns for message in (turn.question, turn.answer)))

    def send(
        self,
        message: str,
        *,
        max_new_tokens: int = 512,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        stream: Callable[[StreamChunk], None] | None = None,
    ) -> Reply:
        """Returns the model's answer to `message` after the conversation so far.

        Args: as those of `generate`.

        Raises:
          ValueError: messages that the template refuses, a conversation that would exceed the capacity, bad
            options. Nothing has changed then.
        """
        return self._answer(
            self.turns,
            message,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            logprobs=logprobs,
            stream=stream,
        )

    def edit(self, index: int, message: str, **options) -> Reply:
        """Returns the answer to `message` in place of question `index` (0 is the first); what followed that
        question is dropped once the new answer is there. Options: as those of `send`."""
        self._check_index(index)
        return self._answer(self.turns[:index], message, **options)

    def retry(self, **options) -> Reply:
        """Returns another answer to the last question, in place of the last one. Options: as `send`."""
        self._check_index(len(self.turns) - 1)
        return self.edit(len(self.turns) - 1, self.turns[-1].question["content"], **options)

    def undo(self) -> Turn:
        """Drops the last question and its answer, and returns them."""
        self._check_index(len(self.turns) - 1)
        dropped, self.turns = self.turns[-1], self.turns[:-1]
        return dropped

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self.turns):
            raise ValueError(f"there is no turn {index}: the conversation has {len(self.turns)}")

    def _answer(
        self,
        turns: tuple[Turn, ...],
        message: str,
        *,
        max_new_tokens: int = 512,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        stream: Callable[[StreamChunk], None] | None = None,
    ) -> Reply:
        began = time.perf_counter()
        question: Message = {"role": "user", "content": message}
        history = [m for turn in turns for m in (turn.question, turn.answer)]
        messages = [*self.system, *history, question]
        model, capacity = self.seat.model, self.seat.capacity
        ids = prompt_ids(model, messages, [turn.represented for turn in turns])
        options = Options.checked(model, [ids], max_new_tokens, sampling, stop, logprobs)
        if len(ids) + max_new_tokens > capacity:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, and max_new_tokens={max_new_tokens} more exceed "
                f"the capacity of {capacity}; undo a turn, ask for fewer, or start with more capacity"
            )
        first_token: list[float] = []

        def watch(chunk: StreamChunk) -> None:
            first_token.append(time.perf_counter())
            if stream is not None:
                stream(chunk)

        at = last_question_start(model, messages, ids)
        result = run_turn(self.seat, ids, options, checkpoint_at=(at,), stream=watch)
        generation = result.generation
        timings = _timings(began, first_token[0], len(generation.token_ids))
        reply = Reply(generation.text, result.plan, timings, generation)
        raw = model.tokenizer.decode(generation.token_ids, skip_special_tokens=False)
        represented = Represented(rendered(model, messages) + raw, (*ids, *generation.token_ids))
        answer = {"role": "assistant", "content": generation.text}
        self.turns = (*turns, Turn(question, answer, represented, reply))
        return reply


def _timings(began: float, first_token: float, tokens: int) -> Timings:
    ended = time.perf_counter()
    rest = ended - first_token
    return Timings(
        first_token_ms=1e3 * (first_token - began),
        total_ms=1e3 * (ended - began),
        tokens_per_second=(tokens - 1) / rest if tokens > 1 and rest > 0 else 0.0,
    )
