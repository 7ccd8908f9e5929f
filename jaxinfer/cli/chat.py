"""`jaxinfer chat`: a conversation, one line a question; lines that begin with / are commands."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.chat_commands import COMMANDS, HELP, ChatCommand
from jaxinfer.cli.chat_turn import Chat, Output, TurnInterrupted, more_room
from jaxinfer.cli.exit_codes import FAILURE, OK, UnreadableError, UsageError, one_line
from jaxinfer.cli.interrupts import in_thread
from jaxinfer.cli.model_source import add_model_options, load_model
from jaxinfer.cli.sampling_options import add_sampling_options, sampling_of
from jaxinfer.cli.terminal import is_terminal, note, stage, write_out

if TYPE_CHECKING:
    from jaxinfer.chat import ChatSession
    from jaxinfer.models import Model

_CAPACITY = 4096


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"Questions are lines of standard input. Commands: {'; '.join(HELP)}."
    parser.add_argument("--system", metavar="TEXT", help="system message, put before the conversation")
    parser.add_argument(
        "--messages", metavar="FILE", help='begin after these: JSON, [{"role": ..., "content": ...}, ...]'
    )
    parser.add_argument("--load", metavar="PATH", help="go on with a conversation that /save kept")
    add_model_options(parser)
    parser.add_argument(
        "--capacity",
        type=int,
        metavar="N",
        help=f"the most tokens of the conversation; default {_CAPACITY}, or what the model's positions allow",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="of an answer; default 512, or what the capacity leaves",
    )
    add_sampling_options(parser)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="S", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="show of each answer what was reused, why, and how fast it came",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a turn or command")


def run(args: argparse.Namespace) -> int:
    with stage("starting"):
        sampling = in_thread(lambda: sampling_of(args))
    before = _messages(args)
    model, _ = load_model(args)
    session = in_thread(lambda: _session(args, model, before))
    output = Output(json=args.json, stats=args.stats)
    chat = Chat(model, session, sampling, args.max_new_tokens, tuple(args.stop), output)
    typed = is_terminal(sys.stdin) and is_terminal(sys.stdout) and not args.json
    note("/help shows the commands, /quit or Ctrl-D ends")
    try:
        for line in _typed_lines() if typed else _piped_lines():
            if not _take(chat, line):
                break
    except KeyboardInterrupt:  # at the prompt: one way to leave
        write_out("" if args.json else "\n")
    return FAILURE if chat.failed and not typed else OK


def _take(chat: Chat, line: str) -> bool:
    """Does what a line asks for and returns whether to go on; what goes wrong is one line."""
    from jaxinfer.chat import CapacityError

    text = line.strip()
    if not text:
        return True
    try:
        if not text.startswith("/"):
            chat.ask(line)
            return True
        name, _, rest = text[1:].partition(" ")
        if name == "quit":
            return False
        command: ChatCommand | None = COMMANDS.get(name)
        if command is None:
            raise UsageError(f"there is no command /{name}; /help shows those there are")
        command(chat, rest.strip())
    except TurnInterrupted:
        pass  # told already
    except CapacityError as error:
        chat.fail(
            f"the conversation has {error.num_tokens} tokens, and its capacity is {error.capacity}: "
            f"a lower --max-new-tokens leaves room, {more_room(chat.session)}"
        )
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        chat.fail(one_line(error))
    return True


def _session(args: argparse.Namespace, model: Model, messages: list[dict[str, Any]]) -> ChatSession:
    from jaxinfer.chat import ChatMismatchError, ChatSession, SavedChatError

    if args.load is not None:
        if args.system is not None or messages:
            raise UsageError("--load brings its own messages: leave out --system and --messages")
        try:
            return ChatSession.load(args.load, model, capacity=args.capacity)
        except ChatMismatchError as error:
            raise UsageError(
                f"{error.difference}; start without --load and type /load-messages {args.load} to have the "
                "messages alone"
            ) from error
        except SavedChatError as error:
            raise UnreadableError(str(error)) from error
    capacity = min(_CAPACITY, model.config.max_positions) if args.capacity is None else args.capacity
    if model.chat_template is None:
        raise UsageError("this model has no chat template: a base model cannot chat; use `jaxinfer generate`")
    return ChatSession(model, capacity=capacity, system=args.system, messages=messages)


def _messages(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the messages of --messages, checked for their form; their roles are the template's to check."""
    if args.messages is None:
        return []
    try:
        messages = json.loads(Path(args.messages).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"--messages {args.messages} is not JSON text: {error}") from error
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise UsageError(f"--messages {args.messages} must hold a list of objects with a role")
    return messages


def _typed_lines() -> Iterator[str]:
    """Yields what is typed, with a prompt and, where Python has readline, line editing."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its editing
    while True:
        try:
            yield input("> ")
        except EOFError:
            write_out("\n")
            return


def _piped_lines() -> Iterator[str]:
    """Yields the lines of standard input as they come."""
    if sys.stdin is None:
        raise UsageError("standard input is closed: there is nobody to talk to")
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"line {number} of standard input is not UTF-8 text: {error.reason}") from None
