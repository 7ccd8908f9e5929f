"""The conversation of `jaxinfer chat`: its turns, what is told of them, and how Ctrl-C ends one alone."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.interrupts import start_thread, watch_again
from jaxinfer.cli.terminal import say, stage, write_json, write_out

if TYPE_CHECKING:
    from jaxinfer.chat import ChatSession, Reply
    from jaxinfer.chat.images import ChatImage
    from jaxinfer.generation import StreamChunk
    from jaxinfer.models import Model
    from jaxinfer.sampling import Sampling


class TurnInterrupted(Exception):
    """The turn was given up; the session is as it was before it."""


@dataclasses.dataclass(frozen=True)
class Output:
    """What is written about a conversation.

    Attributes:
      json: one object a turn or command on stdout, and nothing else there.
      stats: one line about each turn on stderr.
    """

    json: bool
    stats: bool

    def told(self, *lines: str, **record: Any) -> None:
        """Tells what a command did: lines on stderr, or the record as JSON."""
        if self.json:
            write_json(record)
        else:
            for line in lines:
                say(line)

    def error(self, line: str) -> None:
        """Tells what went wrong."""
        if self.json:
            write_json({"error": line})
        say(f"error: {line}")


@dataclasses.dataclass
class Chat:
    """The conversation that the command holds, and how its turns are asked for.

    Attributes:
      session: replaced by /load.
      num_asked: turns taken so far, dropped ones too: each draws with a seed of its own.
      failed: whether some line could not be done.
      images: of the next question.
    """

    model: Model
    session: ChatSession
    sampling: Sampling
    max_new_tokens: int | None
    stop: tuple[str, ...]
    output: Output
    num_asked: int = 0
    failed: bool = False
    images: tuple[ChatImage, ...] = ()

    def ask(self, question: str, index: int | None = None) -> None:
        """Asks, in place of question `index`, whose images it keeps, where it is given."""
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "sampling": self._next_sampling(),
            "stop": self.stop,
        }
        session = self.session

        def send(stream: Any) -> Any:
            if index is None:
                return session.send(question, images=self.images, stream=stream, **options)
            return session.edit(index, question, stream=stream, **options)

        seed = options["sampling"].seed
        take_turn(send, self.output, session, seed=seed)
        if index is None:
            self.images = ()

    def _next_sampling(self) -> Sampling:
        """Returns the sampling of the next turn: another seed each time, or /retry would say the same."""
        sampling = self.sampling
        if sampling.temperature > 0:
            first = secrets.randbits(32) if sampling.seed is None else sampling.seed
            sampling = dataclasses.replace(sampling, seed=(first + self.num_asked) % 2**64)
        self.num_asked += 1
        return sampling

    def fail(self, line: str) -> None:
        """Tells why a line could not be done."""
        self.failed = True
        self.output.error(line)


def take_turn(
    send: Callable[[Callable[[StreamChunk], None]], Reply],
    output: Output,
    session: ChatSession,
    *,
    seed: int | None,
) -> None:
    """Runs a turn in another thread and shows its answer.

    Ctrl-C asks the turn to end at its next piece of text and waits for that; the session then stands where
    it stood. One that comes after the last piece is too late. A second Ctrl-C ends the process.

    Raises:
      TurnInterrupted: and has told so.
    """
    answer = _Answer(echo=not output.json)
    with stage("reading the conversation (a first run compiles)") as end_stage:
        answer.at_first_token = end_stage
        outcome = start_thread(lambda: send(answer))
        try:
            reply = outcome.result()
        except KeyboardInterrupt:
            answer.cancel()
            error = outcome.exception()  # waits for the turn to end
            watch_again()
            if isinstance(error, TurnInterrupted | KeyboardInterrupt):
                _tell_interrupted(answer, output)
                raise TurnInterrupted from None
            reply = outcome.result()
    _tell_reply(reply, output, session, seed)


class _Answer:
    """The callback of a turn: prints what comes, or ends the turn once it is cancelled."""

    def __init__(self, *, echo: bool):
        self.at_first_token: Callable[[], None] = lambda: None
        self.text = ""
        self.num_tokens = 0
        self._echo = echo
        self._cancelled = threading.Event()

    def __call__(self, chunk: StreamChunk) -> None:
        if self._cancelled.is_set():
            raise TurnInterrupted
        if self.num_tokens == 0:
            self.at_first_token()
        self.text += chunk.text
        self.num_tokens += len(chunk.token_ids)
        if self._echo:
            write_out(chunk.text)

    def cancel(self) -> None:
        self._cancelled.set()


def _tell_interrupted(answer: _Answer, output: Output) -> None:
    if output.json:
        write_json({"finish_reason": "interrupted", "text": answer.text, "num_new_tokens": answer.num_tokens})
    elif answer.text:
        write_out("\n")
    say(f"interrupted after {answer.num_tokens} tokens; the conversation is as it was before this turn")


def _tell_reply(reply: Reply, output: Output, session: ChatSession, seed: int | None) -> None:
    if output.json:
        turn = {"turn": len(session.turns), "question": session.turns[-1].text}
        write_json(turn | reply_record(reply) | {"seed": seed})
    elif not reply.text.endswith("\n"):
        write_out("\n")
    if output.stats:
        say(stats_line(reply))
    generation = reply.generation
    num_tokens = len(generation.prompt_token_ids) + len(generation.token_ids)
    if generation.finish_reason == "length" and num_tokens >= session.seat.capacity:
        capacity = session.seat.capacity
        say(f"the answer was cut: the capacity of {capacity} tokens is reached; {more_room(session)}")


def more_room(session: ChatSession) -> str:
    """Returns what to do about a conversation that has become too long."""
    most = session.seat.model.config.max_positions
    return f"/undo takes turns back, --capacity N (at most {most}) starts with more"


def reply_record(reply: Reply) -> dict[str, Any]:
    """Returns what a reply is and how it came about, as plain JSON values."""
    plan, generation, timings = reply.plan, reply.generation, reply.timings
    return {
        "text": reply.text,
        "finish_reason": generation.finish_reason,
        "stop": generation.stop,
        "num_prompt_tokens": len(generation.prompt_token_ids),
        "num_new_tokens": len(generation.token_ids),
        "token_ids": list(generation.token_ids),
        "plan": {
            "mode": plan.mode.value,
            "reason": plan.reason.value,
            "detail": plan.detail,
            "reused_tokens": plan.reusable_len,
            "prefilled_tokens": plan.suffix_len,
        },
        "timings": {
            "first_token_ms": round(timings.first_token_ms, 1),
            "total_ms": round(timings.total_ms, 1),
            "tokens_per_s": round(timings.tokens_per_second, 2),
        },
    }


def stats_line(reply: Reply) -> str:
    """Returns one line: mode, tokens reused, the reason, time to the first token, and the rate after it."""
    timings = reply.timings
    rate = f" · {timings.tokens_per_second:.1f} tokens/s" if timings.tokens_per_second else ""
    return f"{reply.plan.explanation} · first token after {timings.first_token_ms / 1e3:.2f} s{rate}"
