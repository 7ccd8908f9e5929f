"""The journal beside the output: what a job is, how far the output is settled, and the batches done since.

A file of lines, each a checksum, a space and a JSON value. The first is the head; every further one holds the
records of one finished batch of the window under way. When a window's records have been written to the
output, the head is replaced and the batches are dropped, in one atomic step. A line that a kill cut short is
the last one, and its checksum tells: it is dropped, and its batch is answered again, to the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from jaxinfer.batch.durable import AppendFile, BatchFileError, replace_file

FORMAT = 1
_CHECKSUM_DIGITS = 16


@dataclasses.dataclass(frozen=True)
class Settled:
    """How far the output is final.

    Attributes:
      num_rows: rows of the input whose records are in it.
      num_errors: of them, error records.
      num_tokens: generated for them.
      output_bytes, output_sha256: of the records.
      is_complete: there is nothing left to do.
    """

    num_rows: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    output_bytes: int = 0
    output_sha256: str = hashlib.sha256(b"").hexdigest()
    is_complete: bool = False


@dataclasses.dataclass(frozen=True)
class FinishedBatch:
    """The output lines of a batch, in the order of its members, and what they cost."""

    lines: tuple[str, ...]
    num_errors: int
    num_tokens: int


def journal_path(output: Path) -> Path:
    """Returns where the journal of an output lies."""
    return output.with_name(f"{output.name}.journal")


class Journal:
    """The journal of one job.

    Attributes:
      job: what the job is, as JSON values: compared when it goes on.
      started: when it began, ISO 8601.
      settled: how far the output is final.
      batches: of the window under way, those that were finished when the journal was read.
    """

    def __init__(self, path: Path, job: dict[str, Any], started: str):
        self._path, self.job, self.started = path, job, started
        self.settled = Settled()
        self.batches: list[FinishedBatch] = []
        self._file: AppendFile | None = None

    @classmethod
    def create(cls, path: Path, job: dict[str, Any], started: str) -> Journal:
        """Returns the journal of a new job, written in place of any that is there."""
        journal = cls(path, job, started)
        journal.settle(journal.settled)
        return journal

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Returns the journal that a killed job has left.

        Raises:
          BatchFileError: it is not one, or its head is damaged.
        """
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise BatchFileError(f"{path}: {error.strerror}") from error
        head = _unsealed(lines[0]) if lines else None
        if head is None or head.get("jaxinfer_batch") != FORMAT:
            raise BatchFileError(f"{path} is not a journal that this version can read; use --overwrite")
        journal = cls(path, head["job"], head["started"])
        journal.settled = Settled(**head["settled"])
        num_bytes = len(lines[0])
        for line in lines[1:]:
            value = _unsealed(line)
            if value is None:
                break
            journal.batches.append(
                FinishedBatch(tuple(value["lines"]), value["num_errors"], value["num_tokens"])
            )
            num_bytes += len(line)
        journal._file = AppendFile(path)
        journal._file.truncate(num_bytes)
        return journal

    def add(self, batch: FinishedBatch) -> None:
        """Keeps a finished batch."""
        assert self._file is not None
        self._file.append(_sealed(dataclasses.asdict(batch)))

    def settle(self, settled: Settled) -> None:
        """Notes that the output is final so far, and drops the batches."""
        head = {
            "jaxinfer_batch": FORMAT,
            "job": self.job,
            "started": self.started,
            "settled": dataclasses.asdict(settled),
        }
        self.close()
        replace_file(self._path, _sealed(head))
        self.settled, self.batches = settled, []
        self._file = AppendFile(self._path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _sealed(value: dict[str, Any]) -> bytes:
    data = json.dumps(value, ensure_ascii=True, allow_nan=False).encode()
    return _checksum(data) + b" " + data + b"\n"


def _unsealed(line: bytes) -> dict[str, Any] | None:
    """Returns what a line holds; None where it is not whole."""
    checksum, _, data = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != _checksum(data):
        return None
    return json.loads(data)


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest()[:_CHECKSUM_DIGITS].encode()
