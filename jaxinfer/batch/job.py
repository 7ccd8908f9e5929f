"""A whole job: an input file to an output file, window by window, so that a kill at any moment costs one
batch and nothing else.

Order of writing, in which every moment can be the last: each finished batch goes to the journal; when a
window is finished its records go to the output; then the journal's head says so. On resuming, the output is
cut to what the head says, the window under way takes its finished batches from the journal, and the rest is
answered as if nothing had happened: batches are a function of the input and the options alone.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path

from jaxinfer.batch.answer import answer_batch
from jaxinfer.batch.durable import AppendFile
from jaxinfer.batch.encode import Row, encode_request
from jaxinfer.batch.identity import JobSettings, check_same_job, describe_job
from jaxinfer.batch.image_files import images_digest
from jaxinfer.batch.journal import FinishedBatch, Journal, Settled, journal_path
from jaxinfer.batch.lines import InputFacts, Lines, read_lines, scan_input, windows
from jaxinfer.batch.paths import Existing, ResumeError, check_paths
from jaxinfer.batch.plan import Batch, BatchPlanner
from jaxinfer.batch.record import answer_record, error_record
from jaxinfer.batch.request import BadRow, Request, parse_row
from jaxinfer.batch.seen_ids import SeenIds
from jaxinfer.models import Model


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a job is.

    Attributes:
      num_rows: of the input.
      rows_done: answered or found bad, and kept whatever happens now.
      errors: of them, the bad ones.
      tokens: generated, the batch under way included.
      earlier_rows, earlier_tokens: of these, what was there before this process began.
    """

    num_rows: int
    rows_done: int
    errors: int
    tokens: int
    earlier_rows: int
    earlier_tokens: int


Watch = Callable[[Progress], None]


def run_job(
    model: Model,
    input_path: Path,
    output_path: Path,
    settings: JobSettings,
    *,
    existing: Existing = "refuse",
    watch: Watch | None = None,
) -> Progress:
    """Answers every row of a JSONL file, one record a row in the order of the input.

    Args:
      settings: what a row gets that does not say, and how rows are put together.
      existing: what to do about an output that is there: "refuse", "resume" (or begin, where there is none)
        or "overwrite".
      watch: told after every device call how far the job is; may raise to end it, which loses nothing.

    Returns:
      How it ended: every row is done.

    Raises:
      ValueError: paths, settings or an existing output that do not fit; nothing has been changed then. Or an
        input that changes during the job.
      BatchFileError: a file that cannot be written. What is done is kept, as after a kill.
      OSError: an input that cannot be read.
    """
    check_paths(input_path, output_path, existing)
    facts = scan_input(input_path)
    planner = BatchPlanner(model, batch_size=settings.batch_size, memory_bytes=settings.memory_bytes)
    job = describe_job(model, facts, settings, images_digest(input_path))
    journal_file = journal_path(output_path)
    output = AppendFile(output_path)
    try:
        if existing == "resume" and journal_file.exists():
            journal = Journal.read(journal_file)
        else:
            started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            journal = Journal.create(journal_file, job, started)
        try:
            check_same_job(journal.job, job, journal_file)
            return _Run(model, planner, settings, input_path, facts, output, journal).to_the_end(watch)
        finally:
            journal.close()
    finally:
        output.close()


class _Run:
    """One process's part of a job."""

    def __init__(
        self,
        model: Model,
        planner: BatchPlanner,
        settings: JobSettings,
        input_path: Path,
        facts: InputFacts,
        output: AppendFile,
        journal: Journal,
    ):
        self._model, self._planner, self._settings = model, planner, settings
        self._input_path, self._facts, self._output, self._journal = input_path, facts, output, journal
        self._now = datetime.datetime.fromisoformat(journal.started)
        self._watch: Watch | None = None
        settled = journal.settled
        digest = output.sha256_of_first(settled.output_bytes)
        if digest is None or digest.hexdigest() != settled.output_sha256:
            raise ResumeError("the output is not what the job has written; start anew with --overwrite")
        output.truncate(settled.output_bytes)
        self._digest = digest
        self._progress = Progress(
            num_rows=facts.num_rows,
            rows_done=settled.num_rows,
            errors=settled.num_errors,
            tokens=settled.num_tokens,
            earlier_rows=settled.num_rows,
            earlier_tokens=settled.num_tokens,
        )

    def to_the_end(self, watch: Watch | None) -> Progress:
        self._watch = watch
        self._advance()
        if self._journal.settled.is_complete:
            return self._progress
        seen = SeenIds()
        for window in windows(read_lines(self._input_path), self._planner.window_rows):
            self._facts.check_unchanged(self._input_path)
            requests = self._parse(window, seen)
            if window[-1][0] > self._journal.settled.num_rows:
                self._settle(self._answer_window(requests))
        self._journal.settle(dataclasses.replace(self._journal.settled, is_complete=True))
        return self._progress

    def _parse(self, window: Lines, seen: SeenIds) -> list[Request | BadRow]:
        requests = []
        for number, line in window:
            request = parse_row(line, number, self._settings.defaults)
            if not seen.add(request.id, number) and isinstance(request, Request):
                request = BadRow(request.id, number, f"id {request.id!r} was used by an earlier row")
            requests.append(request)
        return requests

    def _answer_window(self, requests: list[Request | BadRow]) -> list[str]:
        """Returns the window's records, after keeping every batch in the journal."""
        lines: list[str] = [""] * len(requests)
        rows: list[Row] = []
        places: list[int] = []
        for place, request in enumerate(requests):
            row = request if isinstance(request, BadRow) else self._encode(request)
            if isinstance(row, Row):
                rows.append(row)
                places.append(place)
            else:
                lines[place] = error_record(row)
        num_bad = len(requests) - len(rows)
        self._advance(rows_done=num_bad, errors=num_bad)
        kept = self._journal.batches
        for index, batch in enumerate(self._planner.plan(rows)):
            if index < len(kept):
                finished = kept[index]
                self._advance(earlier_rows=len(finished.lines), earlier_tokens=finished.num_tokens)
            else:
                finished = self._answer_batch([rows[member] for member in batch.members], batch)
                self._journal.add(finished)
            for member, line in zip(batch.members, finished.lines, strict=True):
                lines[places[member]] = line
            self._advance(
                rows_done=len(finished.lines), errors=finished.num_errors, tokens=finished.num_tokens
            )
        return lines

    def _encode(self, request: Request) -> Row | BadRow:
        limit = self._planner.max_positions
        return encode_request(
            self._model, request, max_positions=limit, now=self._now, folder=self._input_path.parent
        )

    def _answer_batch(self, rows: list[Row], batch: Batch) -> FinishedBatch:
        before = self._progress

        def count(new_tokens: int) -> None:
            self._advance(tokens=new_tokens)

        folder = self._input_path.parent
        answers = answer_batch(self._model, rows, batch, folder=folder, on_tokens=count)
        self._progress = before  # what was sampled behind a stop string does not count
        lines, num_errors, num_tokens = [], 0, 0
        for row, answer in zip(rows, answers, strict=True):
            if isinstance(answer, str):
                num_errors += 1
                lines.append(error_record(BadRow(row.request.id, row.request.line, answer)))
            else:
                num_tokens += len(answer.token_ids)
                lines.append(answer_record(self._model.tokenizer, row, answer))
        return FinishedBatch(tuple(lines), num_errors, num_tokens)

    def _settle(self, lines: list[str]) -> None:
        """Writes a window's records, and then that they are written."""
        data = "".join(f"{line}\n" for line in lines).encode()
        self._output.append(data)
        self._digest.update(data)
        before = self._journal.settled
        self._journal.settle(
            Settled(
                num_rows=before.num_rows + len(lines),
                num_errors=self._progress.errors,
                num_tokens=self._progress.tokens,
                output_bytes=before.output_bytes + len(data),
                output_sha256=self._digest.hexdigest(),
            )
        )

    def _advance(self, **more: int) -> None:
        new = {name: getattr(self._progress, name) + count for name, count in more.items()}
        self._progress = dataclasses.replace(self._progress, **new)
        if self._watch is not None:
            self._watch(self._progress)
