"""`jaxinfer batch`: a JSONL file of prompts to a JSONL file of answers, and on after a kill."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.exit_codes import INTERRUPTED, OK
from jaxinfer.cli.interrupts import in_thread
from jaxinfer.cli.model_source import add_model_options, load_model
from jaxinfer.cli.sampling_options import add_sampling_options, sampling_of
from jaxinfer.cli.sizes import parse_bytes
from jaxinfer.cli.terminal import error_console, is_terminal, note, say, stage, write_json
from jaxinfer.loading.known_models import DEFAULT_MODEL

if TYPE_CHECKING:
    from jaxinfer.batch import JobSettings, Progress

_SECONDS_BETWEEN_LINES = 60  # where stderr is no terminal

_EPILOG = """\
input, one JSON object a line:
  {"id": "a", "prompt": "The sea is"}
  {"id": "b", "messages": [{"role": "user", "content": "Hello"}], "max_new_tokens": 64}
  prompt: text to continue. messages: a chat, written out by the model's template.
  id: a string or an integer, each once; default: the line number.
  Further, each in place of the option of its name: max_new_tokens, temperature,
  top_k, top_p, min_p, repetition_penalty, seed, stop, logprobs.

output, one record a row, in the order of the input:
  {"id": "a", "line": 1, "text": ..., "finish_reason": "stop" or "length", "stop": ...,
   "num_prompt_tokens": ..., "num_new_tokens": ..., "token_ids": [...], "seed": ...}
  {"id": "b", "line": 2, "error": "one sentence"}      a row that cannot be answered

A row without a seed has one made of --seed (default 0) and its id.
OUTPUT.journal keeps what is finished: after a kill, Ctrl-C or a full disk the same
command with --resume goes on, and OUTPUT ends up the same to the byte.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("input", metavar="INPUT", type=Path, help="JSONL, one row a line")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="JSONL, one record a row")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on with OUTPUT, or begin it")
    existing.add_argument("--overwrite", action="store_true", help="drop an OUTPUT that is there")
    parser.add_argument("--batch-size", type=int, metavar="N", help="rows at a time; default 16")
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        metavar="SIZE",
        help="as many rows at a time as their state, weights not counted, fits in: 2GiB",
    )
    add_model_options(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="default 256, or what the model's positions leave"
    )
    add_sampling_options(parser)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="S", help="end before this text; may be repeated"
    )
    parser.add_argument("--logprobs", type=int, metavar="K", help="with those of the K most likely tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object when the job is done")


def run(args: argparse.Namespace) -> int:
    existing = "resume" if args.resume else "overwrite" if args.overwrite else "refuse"
    with stage("starting"):
        settings = in_thread(lambda: _settings(args, existing))
    model, load_s = load_model(args)
    watch = _Watch(is_quiet=args.json)
    try:
        with watch.shown():
            from jaxinfer.batch import run_job

            done = in_thread(
                lambda: run_job(model, args.input, args.output, settings, existing=existing, watch=watch)
            )
    except KeyboardInterrupt:
        say(f"interrupted: {watch.rows_kept()}; the same command with --resume goes on")
        return INTERRUPTED
    if args.json:
        write_json(_summary(args, done, watch, load_s))
    elif done.errors:
        say(f"{args.output}: {done.errors:,} of {done.num_rows:,} rows are error records")
    note(f"{args.output} · {done.num_rows:,} rows · {done.tokens:,} tokens{watch.speed()}")
    return OK


def _settings(args: argparse.Namespace, existing: Any) -> JobSettings:
    """Returns the job's settings; what is wrong with paths and options is told before a model is loaded."""
    from jaxinfer.batch import Defaults, JobSettings, check_paths

    check_paths(args.input, args.output, existing)
    defaults = Defaults(
        max_new_tokens=args.max_new_tokens,
        sampling=sampling_of(args),
        stop=tuple(args.stop),
        logprobs=args.logprobs,
    )
    return JobSettings(defaults, batch_size=args.batch_size, memory_bytes=args.memory)


def _summary(args: argparse.Namespace, done: Progress, watch: _Watch, load_s: float) -> dict[str, Any]:
    rows_per_s, tokens_per_s = watch.rates()
    return {
        "model": args.model or DEFAULT_MODEL,
        "output": str(args.output),
        "num_rows": done.num_rows,
        "num_errors": done.errors,
        "num_new_tokens": done.tokens,
        "num_resumed_rows": done.earlier_rows,
        "timings": {
            "load_ms": round(load_s * 1e3, 1),
            "rows_per_s": rows_per_s,
            "tokens_per_s": tokens_per_s,
        },
    }


class _Watch:
    """What a job has told of itself, as a bar on a terminal and as a line a minute elsewhere."""

    def __init__(self, *, is_quiet: bool):
        self._is_quiet = is_quiet
        self._is_closed = False
        self._lock = threading.Lock()
        self._latest: Progress | None = None
        self._start = self._last_line = time.perf_counter()
        self._end: float | None = None
        self._show: Callable[[Progress], None] = self._show_line

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            if self._is_closed:
                raise KeyboardInterrupt
            if self._latest is None:
                self._start = self._last_line = time.perf_counter()
            self._latest = progress
            self._show(progress)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Shows what comes; when this ends, nothing more is taken and the job's next call ends it."""
        try:
            if is_terminal(sys.stderr):
                with self._bar():
                    yield
            else:
                yield
        finally:
            with self._lock:
                self._is_closed, self._end = True, time.perf_counter()

    @contextlib.contextmanager
    def _bar(self) -> Iterator[None]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Bar(*columns, console=error_console(), transient=True) as bar:
            task = bar.add_task("reading the rows", total=None)

            def show(progress: Progress) -> None:
                bar.update(
                    task,
                    total=progress.num_rows,
                    completed=progress.rows_done,
                    description=self._rates_text(),
                )

            self._show = show
            yield

    def _show_line(self, progress: Progress) -> None:
        now = time.perf_counter()
        if not self._is_quiet and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            say(f"{progress.rows_done:,} of {progress.num_rows:,} rows · {self._rates_text()}")

    def rates(self) -> tuple[float | None, float | None]:
        """Returns rows and tokens a second of this process; None before there are any."""
        latest, seconds = self._latest, (self._end or time.perf_counter()) - self._start
        if latest is None:
            return None, None
        rows, tokens = latest.rows_done - latest.earlier_rows, latest.tokens - latest.earlier_tokens
        return round(rows / seconds, 3) if rows else None, round(tokens / seconds, 2) if tokens else None

    def rows_kept(self) -> str:
        """Returns how many rows are done, in words."""
        latest = self._latest
        return (
            "nothing is done yet"
            if latest is None
            else f"{latest.rows_done} of {latest.num_rows} rows are done"
        )

    def speed(self) -> str:
        """Returns the rates as the end of a line; nothing where nothing was generated."""
        rows_per_s, tokens_per_s = self.rates()
        return (
            ""
            if None in (rows_per_s, tokens_per_s)
            else f" · {rows_per_s:.2f} rows/s · {tokens_per_s:.1f} tokens/s"
        )

    def _rates_text(self) -> str:
        rows_per_s, tokens_per_s = self.rates()
        parts = [f"{tokens_per_s:.1f} tokens/s"] if tokens_per_s else []
        latest = self._latest
        if rows_per_s and latest is not None:
            parts.insert(0, f"{rows_per_s:.2f} rows/s")
            parts.append(f"{_duration((latest.num_rows - latest.rows_done) / rows_per_s)} left")
        return " · ".join(parts) or "a first batch compiles"


def _duration(seconds: float) -> str:
    """Returns "1:02:03", or "2:03" below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
