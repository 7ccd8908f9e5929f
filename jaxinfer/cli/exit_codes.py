"""How a command ends: its exit code, and the one line that says why."""

from __future__ import annotations

OK = 0
FAILURE = 1
BAD_USE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE


class UsageError(ValueError):
    """Arguments that do not fit, or that this model cannot serve."""


class OutputError(OSError):
    """The process was started without a standard output."""


class UnreadableError(OSError):
    """A file that was named is not what it should be."""


def exit_code_of(error: BaseException) -> int:
    """Returns the code for an exception: a ValueError is the caller's, except that a file is at fault."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if isinstance(error, ValueError):
        from jaxinfer.loading.tensor_source import CheckpointError

        return FAILURE if isinstance(error, CheckpointError) else BAD_USE
    return FAILURE


def one_line(error: BaseException) -> str:
    """Returns what went wrong, on one line; with the kind of error where it was not raised for a reader."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    meant_for_readers = type(error).__module__.startswith("jaxinfer.") or isinstance(error, ValueError)
    if text and (meant_for_readers or isinstance(error, NotImplementedError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
