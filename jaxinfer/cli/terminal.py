"""What people see: lines, progress and reports.

Answers go to standard output and nothing else does. Everything about the work (progress, notes, errors)
goes to standard error: moving displays only where that is a terminal, single lines otherwise.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 200  # columns of a report that no terminal will wrap


def say(line: str) -> None:
    """Writes one line to stderr, `jaxinfer: ...`; a reader that is gone does not matter."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"jaxinfer: {line}\n")
        sys.stderr.flush()


def note(line: str) -> None:
    """Writes a dim line about the work to stderr where that is a terminal."""
    if is_terminal(sys.stderr):
        error_console().print(line, style="dim", highlight=False, markup=False)


def write_out(text: str) -> None:
    """Writes to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: dict[str, Any]) -> None:
    """Writes one JSON object on one line to standard output."""
    write_out(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def error_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def render(*parts: Any) -> str:
    """Returns rich renderables as the text that fits standard output: coloured and as wide as the
    terminal, or plain and wide."""
    from rich.console import Console

    shown = is_terminal(sys.stdout)
    console = Console(file=sys.stdout, width=None if shown else _PIPED_WIDTH, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    lines = captured.get().splitlines()
    return "\n".join(line if shown else line.rstrip() for line in lines) + "\n"


@contextlib.contextmanager
def stage(label: str) -> Iterator[Callable[[], None]]:
    """Shows on a terminal's stderr that something is going on; gives a function that ends it early."""
    if not is_terminal(sys.stderr):
        yield lambda: None
        return
    from rich.text import Text

    status = error_console().status(Text(label, style="dim"), spinner="dots", spinner_style="cyan")
    with status:
        yield status.stop


def show_library_warnings() -> None:
    """Sends warnings that the library logs to stderr, one line each."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(f"{record.levelname.lower()}: {' '.join(record.getMessage().split())}")

    logger = logging.getLogger("jaxinfer")
    logger.addHandler(Lines(logging.WARNING))
    logger.propagate = False
