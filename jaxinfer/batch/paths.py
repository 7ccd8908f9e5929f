"""What may be read and written: refused early, before a model is loaded, and again by the job itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from jaxinfer.batch.durable import BatchFileError
from jaxinfer.batch.journal import journal_path

Existing = Literal["refuse", "resume", "overwrite"]


class ResumeError(ValueError):
    """A job that cannot go on from what is there; the message is one line."""


def check_paths(input_path: Path, output_path: Path, existing: Existing) -> None:
    """Raises where a job must not begin: see `run_job`. Nothing is changed.

    Raises:
      OSError: there is no input.
      ValueError: the output is the input, or is there and `existing` is "refuse", or cannot be resumed.
      BatchFileError: the output cannot be written.
    """
    os.stat(input_path)
    journal = journal_path(output_path)
    for path in (output_path, journal):
        if path.exists() and os.path.samefile(input_path, path):
            raise ValueError(f"{path} is the input; the output needs a file of its own")
        if path.exists() and not path.is_file():
            raise BatchFileError(f"{path} is not a regular file")
    folder = output_path.parent
    if not folder.is_dir():
        raise BatchFileError(f"{folder}: there is no such folder to write {output_path.name} in")
    for path in (folder, *(path for path in (output_path, journal) if path.exists())):
        if not os.access(path, os.W_OK):
            raise BatchFileError(f"{path}: it cannot be written")
    there = next((path for path in (output_path, journal) if path.exists()), None)
    if existing == "refuse" and there is not None:
        raise ValueError(f"{there} is there already; go on with --resume, or start anew with --overwrite")
    has_records = output_path.exists() and output_path.stat().st_size > 0
    if existing == "resume" and has_records and not journal.exists():
        raise ResumeError(f"{output_path} has no {journal.name} beside it to resume from; use --overwrite")
