"""The command `jaxinfer`: `main`, and one file a command.

No module here imports jax, or a part of the library that does, before it has to: help, wrong arguments and
`pull` answer without it.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from jaxinfer.cli import generate, info, pull
from jaxinfer.cli.command import Command
from jaxinfer.cli.exit_codes import OK, OutputError, UsageError, exit_code_of, one_line
from jaxinfer.cli.start_up import configure_jax, end_on_second_interrupt, restart_with_huge_pages
from jaxinfer.cli.terminal import say, show_library_warnings, silence_stdout, write_out

COMMANDS: tuple[Command, ...] = (generate.COMMAND, pull.COMMAND, info.COMMAND)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0; 1 for a failure; 2 for bad use; 130 after Ctrl-C; 141 when whoever read the output is gone. Whatever
    goes wrong is one line on stderr.

    Args:
      argv: the arguments. None takes the process's own and sets the process up for one command (signals,
        memory, jax's settings); given ones leave the process as it is.
    """
    is_program = argv is None
    arguments: argparse.Namespace | None = None
    try:
        if is_program:
            end_on_second_interrupt()
            show_library_warnings()
        if sys.stdout is None:
            raise OutputError("standard output is closed")
        arguments = _parser().parse_args(argv)
        command: Command = arguments.command
        if is_program and command.uses_jax:
            restart_with_huge_pages()
            configure_jax()
        return command.run(arguments)
    except SystemExit as finished:  # argparse, after printing help or the version
        return OK if finished.code is None else int(finished.code)
    except BaseException as error:
        if arguments is not None and arguments.traceback:
            traceback.print_exc()
        return _ended_by(error, is_program)


def _ended_by(error: BaseException, is_program: bool) -> int:
    if isinstance(error, KeyboardInterrupt):
        say("interrupted")
    elif isinstance(error, BrokenPipeError):
        if is_program:
            silence_stdout()
    else:
        say(f"error: {one_line(error)}")
    return exit_code_of(error)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


class _Version(argparse.Action):
    def __call__(self, *unused: object) -> NoReturn:
        from jaxinfer.cli.facts import own_version

        write_out(f"jaxinfer {own_version()}\n")
        raise SystemExit(OK)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxinfer",
        description="Language model inference with JAX.",
        epilog="Models are kept in $JAXINFER_CACHE (default ~/.cache/jaxinfer).",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            allow_abbrev=False,
        )
        command.add_options(sub)
        sub.add_argument("--traceback", action="store_true", help="on an error, show where it came from too")
        sub.set_defaults(command=command)
    return parser
