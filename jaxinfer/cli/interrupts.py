"""Ctrl-C: the first one ends a command in good order and at once, a second one ends the process.

Python raises KeyboardInterrupt in the main thread between two of its instructions. A compilation is one
instruction that takes seconds, and extension modules that are being imported turn the exception into other
ones. So whatever does such things runs in another thread while the main thread waits for it, and is left
behind when the wait is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")


def watch_for_interrupts() -> None:
    """Takes over SIGINT, unless it is ignored as in a background job."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _first_interrupt)


def watch_again() -> None:
    """Makes the next Ctrl-C a first one again, for a command that goes on after one."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # so `_first_interrupt` left it
        signal.signal(signal.SIGINT, _first_interrupt)


def _first_interrupt(number: int, frame: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def in_thread(function: Callable[[], Result]) -> Result:
    """Returns what `function` returns, or raises what it raises, from another thread.

    On a KeyboardInterrupt here the thread is left to itself: the process is about to end with `leave`.
    """
    return start_thread(function).result()


def start_thread(function: Callable[[], Result]) -> Future[Result]:
    """Returns what `function` will return or raise in another thread, which the process does not wait for."""
    outcome: Future[Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome


def leave(exit_code: int) -> NoReturn:
    """Ends the process without the interpreter's shutdown.

    The shutdown would flush to a reader that is gone, and free what a computation under way still uses.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code)
