"""`jaxinfer pull`: brings a known model into the cache."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxinfer.cli.exit_codes import OK, UsageError
from jaxinfer.cli.sizes import format_bytes
from jaxinfer.cli.terminal import error_console, is_terminal, render, say, write_json, write_out
from jaxinfer.loading.cache import is_pulled, model_path
from jaxinfer.loading.known_models import DEFAULT_MODEL, KNOWN_MODELS, KnownModel
from jaxinfer.loading.pull import pull


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"one of {', '.join(KNOWN_MODELS)}")
    parser.add_argument("--list", action="store_true", help="show the known models instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.list:
        if args.name is not None:
            raise UsageError("pull takes a NAME or --list, not both")
        _write_list(as_json=args.json)
        return OK
    if args.name not in KNOWN_MODELS:
        wrong = "needs a NAME" if args.name is None else f"knows no model {args.name!r}"
        raise UsageError(f"pull {wrong}; known: {', '.join(KNOWN_MODELS)}")
    path = pull_with_progress(args.name)
    if args.json:
        write_json({**describe(KNOWN_MODELS[args.name]), "path": str(path)})
    else:
        write_out(f"{path}\n")
    return OK


def pull_with_progress(name: str) -> Path:
    """Makes a known model present and returns its file, telling on stderr what it is and how far it got."""
    model = KNOWN_MODELS[name]
    if is_pulled(model):
        return model_path(model)
    size = format_bytes(model.download_bytes)
    say(f"pulling {model.name}: {model.title}, {size}, licence {model.licence}")
    if not is_terminal(sys.stderr):
        return pull(name)
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=error_console(), transient=True) as progress:
        task = progress.add_task("pulling", total=model.download_bytes)

        def report(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=label.removeprefix(f"{name}: "))

        return pull(name, progress=report)


def describe(model: KnownModel) -> dict[str, Any]:
    """Returns what there is to know about a known model before it is opened."""
    return {
        "name": model.name,
        "title": model.title,
        "licence": model.licence,
        "file_bytes": model.num_bytes,
        "pulled": is_pulled(model),
    }


def _write_list(*, as_json: bool) -> None:
    models = [describe(model) for model in KNOWN_MODELS.values()]
    if as_json:
        write_json({"models": models})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("NAME", "MODEL", "SIZE", "LICENCE", "PULLED"):
        table.add_column(heading, justify="right" if heading == "SIZE" else "left")
    for entry in models:
        name = entry["name"] + (" (default)" if entry["name"] == DEFAULT_MODEL else "")
        table.add_row(
            name,
            entry["title"],
            format_bytes(entry["file_bytes"]),
            entry["licence"],
            "yes" if entry["pulled"] else "no",
        )
    write_out(render(table))
