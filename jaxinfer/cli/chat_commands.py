"""What a line that begins with / does in `jaxinfer chat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxinfer.cli.chat_turn import Chat, reply_record, stats_line
from jaxinfer.cli.exit_codes import UsageError
from jaxinfer.cli.sizes import format_bytes

ChatCommand = Callable[[Chat, str], None]

HELP = (
    "/image PATH shows an image with the next question; may be repeated",
    "/undo drops the last question and its answer",
    "/edit N TEXT asks TEXT in place of question N, the first is 1, and drops what followed",
    "/retry asks the last question again",
    "/save PATH keeps the conversation with its state, /load PATH goes on with it",
    "/load-messages PATH goes on with its messages alone, whatever the model",
    "/stats shows what each turn reused, why, and how fast it was",
    "/quit ends; a question that begins with / needs a space before it",
)


def _image(chat: Chat, rest: str) -> None:
    from jaxinfer.chat.images import read_images

    chat.images += read_images(chat.model, [_path("image", rest)])
    count = len(chat.images)
    shown = "1 image" if count == 1 else f"{count} images"
    chat.output.told(f"the next question comes with {shown}", command="image", path=rest, num_images=count)


def _undo(chat: Chat, rest: str) -> None:
    _no_argument("undo", rest)
    dropped = chat.session.undo()
    left = len(chat.session.turns)
    chat.output.told(
        f"dropped question {left + 1}: {dropped.text}",
        command="undo",
        dropped=dropped.text,
        num_turns=left,
    )


def _edit(chat: Chat, rest: str) -> None:
    number, _, text = rest.partition(" ")
    if not number.isdecimal() or not text.strip():
        raise UsageError("write /edit N TEXT, N the number of the question; the first is 1")
    turns = len(chat.session.turns)
    if not 1 <= int(number) <= turns:
        raise UsageError(f"there is no question {number}: the conversation has {turns}")
    chat.ask(text.strip(), int(number) - 1)


def _retry(chat: Chat, rest: str) -> None:
    _no_argument("retry", rest)
    turns = chat.session.turns
    if not turns:
        raise UsageError("there is nothing to retry: no question was answered yet")
    chat.ask(turns[-1].text, len(turns) - 1)


def _save(chat: Chat, rest: str) -> None:
    chat.session.save(_path("save", rest))
    chat.output.told(f"saved to {rest}", command="save", path=rest, num_turns=len(chat.session.turns))


def _load(chat: Chat, rest: str) -> None:
    _replace_session(chat, "load", rest)


def _load_messages(chat: Chat, rest: str) -> None:
    _replace_session(chat, "load-messages", rest, messages_only=True, capacity=chat.session.seat.capacity)


def _replace_session(chat: Chat, name: str, rest: str, **options: Any) -> None:
    from jaxinfer.chat import ChatMismatchError, ChatSession

    try:
        chat.session = ChatSession.load(_path(name, rest), chat.model, **options)
    except ChatMismatchError as error:
        raise UsageError(
            f"{error.difference}; /load-messages {rest} brings back the messages alone"
        ) from error
    turns, capacity = len(chat.session.turns), chat.session.seat.capacity
    chat.output.told(
        f"loaded {turns} turns from {rest}, capacity {capacity}",
        command=name,
        path=rest,
        num_turns=turns,
        capacity=capacity,
    )


def _stats(chat: Chat, rest: str) -> None:
    _no_argument("stats", rest)
    session = chat.session
    seat = session.seat
    lines, records = [], []
    for number, turn in enumerate(session.turns, 1):
        records.append(None if turn.reply is None else reply_record(turn.reply))
        lines.append(f"{number}: {'loaded' if turn.reply is None else stats_line(turn.reply)}")
    slot = seat.store.slots.get(seat.slot)
    held = 0 if slot is None else slot.entry.represented_len
    size_bytes = 0 if slot is None else slot.size_bytes
    checkpoints = () if slot is None else slot.ring.lengths
    lines.append(
        f"{len(session.turns)} turns · the state holds {held} of {seat.capacity} tokens in "
        f"{format_bytes(size_bytes)}" + (f" · checkpoints at {list(checkpoints)}" if checkpoints else "")
    )
    chat.output.told(
        *lines,
        command="stats",
        turns=records,
        held_tokens=held,
        capacity=seat.capacity,
        state_bytes=size_bytes,
        checkpoints=list(checkpoints),
    )


def _help(chat: Chat, rest: str) -> None:
    chat.output.told(*HELP, command="help", help=list(HELP))


def _path(name: str, rest: str) -> str:
    if not rest:
        raise UsageError(f"write /{name} PATH")
    return rest


def _no_argument(name: str, rest: str) -> None:
    if rest:
        raise UsageError(f"/{name} takes nothing after it")


COMMANDS: dict[str, ChatCommand] = {
    "image": _image,
    "undo": _undo,
    "edit": _edit,
    "retry": _retry,
    "save": _save,
    "load": _load,
    "load-messages": _load_messages,
    "stats": _stats,
    "help": _help,
}
