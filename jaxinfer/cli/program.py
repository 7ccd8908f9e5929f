"""From arguments to a command, and from whatever ends it to an exit code."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from jaxinfer.cli.command import Command, CommandModule
from jaxinfer.cli.exit_codes import (
    BROKEN_PIPE,
    INTERRUPTED,
    OK,
    OutputError,
    UsageError,
    exit_code_of,
    one_line,
)
from jaxinfer.cli.interrupts import in_thread, leave
from jaxinfer.cli.start_up import configure_jax, restart_with_huge_pages
from jaxinfer.cli.terminal import say, show_library_warnings, write_out

COMMANDS = (
    Command("generate", "continue a prompt", uses_jax=True),
    Command("chat", "hold a conversation", uses_jax=True),
    Command("batch", "answer every row of a JSONL file", uses_jax=True),
    Command("bench", "measure how fast a model runs here", uses_jax=True),
    Command("pull", "fetch a known model into the cache", uses_jax=False),
    Command("info", "show what runs here, and what a model is and needs", uses_jax=True),
)


def run_program() -> int:
    """Runs the command that the process was started for."""
    show_library_warnings()
    code = run(sys.argv[1:], is_program=True)
    if code in (INTERRUPTED, BROKEN_PIPE):
        leave(code)
    return code


def run(argv: Sequence[str], *, is_program: bool) -> int:
    """Runs one command and returns its exit code; `is_program` sets the process up for it."""
    arguments: argparse.Namespace | None = None
    name = next((argument for argument in argv if not argument.startswith("-")), None)
    command = next((each for each in COMMANDS if each.name == name), None)
    try:
        if sys.stdout is None:
            raise OutputError("standard output is closed")
        uses_jax = is_program and command is not None and command.uses_jax
        if uses_jax:
            restart_with_huge_pages()
        module = None if command is None else in_thread(command.load)
        arguments = _parser(command, module).parse_args(argv)
        if uses_jax:
            in_thread(configure_jax)
        return arguments.run(arguments)
    except SystemExit as finished:  # argparse, after printing help or the version
        return OK if finished.code is None else int(finished.code)
    except BaseException as error:
        if arguments is not None and arguments.traceback:
            traceback.print_exc()
        code = exit_code_of(error)
        if code == INTERRUPTED:
            say("interrupted")
        elif code != BROKEN_PIPE:
            say(f"error: {one_line(error)}")
        return code


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


class _Version(argparse.Action):
    def __call__(self, *unused: object) -> NoReturn:
        from jaxinfer.version import own_version

        write_out(f"jaxinfer {own_version()}\n")
        raise SystemExit(OK)


def _parser(chosen: Command | None, module: CommandModule | None) -> argparse.ArgumentParser:
    """Returns the parser of all commands, with the options of the chosen one, whose module is given."""
    parser = _Parser(
        prog="jaxinfer",
        description="Language model inference with JAX.",
        epilog="Models are kept in $JAXINFER_CACHE (default ~/.cache/jaxinfer).",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        description = f"{command.summary[0].upper()}{command.summary[1:]}."
        sub = commands.add_parser(
            command.name, help=command.summary, description=description, allow_abbrev=False
        )
        if command is chosen and module is not None:
            module.add_options(sub)
            sub.add_argument(
                "--traceback", action="store_true", help="on an error, show where it came from too"
            )
            sub.set_defaults(run=module.run)
    return parser
