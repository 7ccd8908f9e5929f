"""The harness's side of a contender: a process that stays alive, idle but while it is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Self

from benchmarks.machine import ROOT, worker_environment

START_TIMEOUT_S = 600  # it loads the model
_LOG_CHARACTERS = 1500


class ContenderError(RuntimeError):
    """A worker that failed, died or did not answer in time; the message says which and why."""


NATIVE = "native"  # this library with the kernels of `python -m pallas_kernels.native`


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a result: a library in one dtype and one way of running it.

    Attributes:
      mode: "" for the library's own way; else what is different.
    """

    library: str
    dtype: str
    mode: str = ""

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.library, self.dtype, self.mode) if part)


class Contender:
    """A worker process of one entry.

    Args:
      command: what to start; it answers as `benchmarks.worker.serve` does.
      malloc: "huge" or "plain".
    """

    def __init__(self, entry: Entry, command: Sequence[str], malloc: str):
        self.entry = entry
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=worker_environment(malloc),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._unread = b""
        try:
            self.hello = self._answer("start", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def request(self, op: str, *, timeout_s: float = 300, **arguments: Any) -> dict[str, Any]:
        """Returns the worker's answer.

        Raises:
          ContenderError: the operation failed, or the worker is gone; one that does not answer is ended.
        """
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ContenderError(
                f"{self.entry.name}: {op}: the worker is gone: {self._end_of_log()}"
            ) from error
        return self._answer(op, timeout_s)

    def close(self) -> None:
        """Ends the worker: by its input's end, by force where it does not follow."""
        with contextlib.suppress(OSError):  # it may be gone already
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _answer(self, op: str, timeout_s: float) -> dict[str, Any]:
        line = self._line(time.perf_counter() + timeout_s)
        if line is None:
            self._process.kill()
            raise ContenderError(f"{self.entry.name}: {op}: no answer within {timeout_s:.0f} s; ended")
        if not line:
            raise ContenderError(f"{self.entry.name}: {op}: the worker is gone: {self._end_of_log()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ContenderError(f"{self.entry.name}: {op}: {answer['error']}")
        return answer

    def _line(self, deadline: float) -> bytes | None:
        """Returns the next line, b"" at the end of the output, None when it is late."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.perf_counter())):
                    return None
                piece = self._process.stdout.read1(1 << 16)
                if not piece:
                    return b""
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end_of_log(self) -> str:
        self._log.seek(0)
        text = " ".join(self._log.read().split())
        return text[-_LOG_CHARACTERS:] or "it wrote no error"
