"""One conversation: each turn reuses what the state of the last one allows, and says what it did."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from jaxinfer.chat.images import ChatImage, read_images
from jaxinfer.chat.prompt import (
    Message,
    Represented,
    last_question_start,
    prompt_of,
    question_of,
    rendered,
    rendered_before,
)
from jaxinfer.chat.reply import Reply, Timings, Turn
from jaxinfer.chat.saved_files import read_record
from jaxinfer.chat.saved_session import read_slot, read_turns, write_session
from jaxinfer.chat.turn import Seat, run_turn, seat_bytes
from jaxinfer.generation import StreamChunk
from jaxinfer.generation.image_features import ImageEncoder
from jaxinfer.generation.image_prompts import ShownPrompt
from jaxinfer.generation.rows import GREEDY, Options
from jaxinfer.images import ImageSource
from jaxinfer.models import Model
from jaxinfer.prefix import PrefixStore
from jaxinfer.sampling import Sampling

_NEW_TOKENS = 512


class CapacityError(ValueError):
    """A conversation has no room for the answer that was asked for.

    Attributes:
      num_tokens: of the conversation with its new question.
      capacity: the most that it may hold.
    """

    def __init__(self, message: str, num_tokens: int, capacity: int):
        super().__init__(message)
        self.num_tokens, self.capacity = num_tokens, capacity


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
      messages: messages that come before the first turn, after `system`: examples, an earlier conversation.

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
        messages: Sequence[Message] = (),
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
        first: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
        self.preamble: tuple[Message, ...] = (*first, *messages)
        self.turns: tuple[Turn, ...] = ()
        if store is None:
            store = PrefixStore(2 * seat_bytes(model, capacity, checkpoints))
        self.seat = Seat(store, slot, model, capacity, checkpoints)
        self._encoder = ImageEncoder(model)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""
        return (*self.preamble, *(message for turn in self.turns for message in (turn.question, turn.answer)))

    def send(
        self,
        message: str,
        *,
        images: Sequence[ImageSource | ChatImage] = (),
        max_new_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        stream: Callable[[StreamChunk], None] | None = None,
    ) -> Reply:
        """Returns the model's answer to `message` after the conversation so far.

        Control tokens that the message spells are read as text, where the tokenizer lets them: see
        `Tokenizer.guard`.

        Args:
          images: shown before the text: Pillow images, uint8 arrays, paths or a file's bytes. They stay in
            the conversation, as they are now.
          max_new_tokens: the most tokens of the answer; None: 512, or what the capacity leaves.
          sampling, stop, logprobs, stream: as those of `generate`.

        Raises:
          CapacityError: the conversation would exceed the capacity.
          ImageError: an image that cannot be read, or a model or a chat template that takes none.
          ValueError: messages that the template refuses, bad options. Nothing has changed then.
        """
        return self._answer(
            self.turns,
            message,
            read_images(self.seat.model, images),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            logprobs=logprobs,
            stream=stream,
        )

    def edit(
        self,
        index: int,
        message: str,
        *,
        images: Sequence[ImageSource | ChatImage] | None = None,
        **options,
    ) -> Reply:
        """Returns the answer to `message` in place of question `index` (0 is the first); what followed that
        question is dropped once the new answer is there.

        Args:
          images: as those of `send`; None: those that the question had.
          **options: as those of `send`.
        """
        self._check_index(index)
        kept = self.turns[index].images if images is None else read_images(self.seat.model, images)
        return self._answer(self.turns[:index], message, kept, **options)

    def retry(self, **options) -> Reply:
        """Returns another answer to the last question, in place of the last one. Options: as `send`."""
        self._check_index(len(self.turns) - 1)
        return self.edit(len(self.turns) - 1, self.turns[-1].text, **options)

    def undo(self) -> Turn:
        """Drops the last question and its answer, and returns them."""
        self._check_index(len(self.turns) - 1)
        dropped, self.turns = self.turns[-1], self.turns[:-1]
        return dropped

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the conversation and its state to the directory `path`.

        A conversation saved there before is replaced in one step: whatever goes wrong, the directory holds
        the old one or the new one. Messages are JSON in it, with the bytes of their images (a path that was
        given is not read again); arrays are written by orbax. Without a state in the store (no turn yet, or
        other slots took its room) the messages alone are saved.

        Raises:
          ValueError: `path` holds something else, or a message is not plain JSON.
          ImportError: orbax-checkpoint is not installed (the extra `checkpoint`).
        """
        write_session(Path(path), self.seat, self.preamble, self.turns)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Model,
        *,
        capacity: int | None = None,
        store: PrefixStore | None = None,
        slot: Hashable = 0,
        checkpoints: int | None = None,
        messages_only: bool = False,
    ) -> ChatSession:
        """Returns the conversation saved at `path`; its next turn appends to the saved state.

        The state is taken only where the weights, config and dtype, the tokenizer, the chat template, the
        capacity, and dtype and window policy of the key/value rows are those it was saved with.

        Args:
          capacity, checkpoints: None: as saved.
          store, slot: as for a new session.
          messages_only: leave the state out; the next turn computes it, with whatever model this is.

        Raises:
          ChatMismatchError: the state belongs to something else; the message names what.
          SavedChatError: nothing was saved here, or not to its end, or it is damaged.
          ImportError: there is a state, and orbax-checkpoint is not installed.
        """
        path = Path(path)
        record = read_record(path)
        session = cls(
            model,
            capacity=record["identity"]["capacity"] if capacity is None else capacity,
            store=store,
            slot=slot,
            checkpoints=record["checkpoints"] if checkpoints is None else checkpoints,
            messages=record["preamble"],
        )
        session.turns = read_turns(record, session.seat)
        held = None if messages_only else read_slot(path, record, session.seat)
        if held is not None:
            session.seat.store.put(slot, held)
        return session

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self.turns):
            raise ValueError(f"there is no turn {index}: the conversation has {len(self.turns)}")

    def _answer(
        self,
        turns: tuple[Turn, ...],
        message: str,
        images: tuple[ChatImage, ...],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        stream: Callable[[StreamChunk], None] | None = None,
    ) -> Reply:
        began = time.perf_counter()
        question = question_of(message, len(images))
        history = [m for turn in turns for m in (turn.question, turn.answer)]
        messages = [*self.preamble, *history, question]
        earlier = [image.prepared for turn in turns for image in turn.images]
        shown = [*earlier, *(image.prepared for image in images)]
        model, capacity = self.seat.model, self.seat.capacity
        text = rendered(model, messages, shown)
        prompt = prompt_of(model, text, [turn.represented for turn in turns if turn.represented], shown)
        ids = list(prompt.token_ids)
        wanted = max(1, min(_NEW_TOKENS, capacity - len(ids))) if max_new_tokens is None else max_new_tokens
        if isinstance(wanted, int) and len(ids) + wanted > capacity:
            raise CapacityError(
                f"the conversation has {len(ids)} tokens, and max_new_tokens={wanted} more exceed the "
                f"capacity of {capacity}; undo a turn, ask for fewer, or start with more capacity",
                len(ids),
                capacity,
            )
        options = Options.checked(model, [ids], wanted, sampling, stop, logprobs)
        first_token: list[float] = []

        def watch(num_tokens: int) -> None:
            first_token.append(time.perf_counter())

        at = ()
        if self.seat.wants_checkpoints(has_images=bool(shown)):
            head = rendered_before(model, messages[:-1], earlier)
            at = (last_question_start(text, head, ids, model),)
        result = run_turn(
            self.seat,
            ids,
            options,
            checkpoint_at=at,
            shown=ShownPrompt(prompt, tuple(shown)) if shown else None,
            encoder=self._encoder,
            stream=stream,
            on_tokens=watch,
        )
        generation = result.generation
        timings = _timings(began, first_token[0], len(generation.token_ids))
        reply = Reply(generation.text, result.plan, timings, generation)
        raw = model.tokenizer.decode(generation.token_ids, skip_special_tokens=False)
        represented = Represented(text + raw, (*ids, *generation.token_ids), prompt.content)
        answer = {"role": "assistant", "content": generation.text}
        self.turns = (*turns, Turn(question, answer, represented, reply, images))
        return reply


def _timings(began: float, first_token: float, tokens: int) -> Timings:
    ended = time.perf_counter()
    rest = ended - first_token
    return Timings(
        first_token_ms=1e3 * (first_token - began),
        total_ms=1e3 * (ended - began),
        tokens_per_second=(tokens - 1) / rest if tokens > 1 and rest > 0 else 0.0,
    )
