"""Patches a second through Gemma 3's image tower, beside transformers; one command, JSON out.

    python -m benchmarks.vision --peer-python OTHER_ENVIRONMENT/bin/python

The tower has its real shape and random weights. Both sides take the same pixels in turn, round after round,
and end with the features as a numpy array.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contender import Contender, Entry
from benchmarks.machine import HUGE_PAGES, ROOT, machine_record, pin_threads, wait_until_quiet
from benchmarks.rounds import Conditions, Measured, measure, ratio
from benchmarks.vision_worker import SIZES, TOKENS

LIBRARIES = ("jaxinfer", "transformers")
PATCHES = (SIZES["image_size"] // SIZES["patch_size"]) ** 2


def measure_dtype(dtype: str, args: argparse.Namespace, conditions: Conditions) -> dict[str, Any]:
    pythons = {"jaxinfer": sys.executable, "transformers": args.peer_python or sys.executable}
    with contextlib.ExitStack() as stack:
        contenders = [
            stack.enter_context(
                Contender(
                    Entry(library, dtype),
                    [pythons[library], "-m", "benchmarks.vision_worker", library, dtype, str(args.layers)],
                    args.malloc,
                )
            )
            for library in LIBRARIES
        ]
        found = measure(contenders, "encode", {}, conditions)
        peaks = {one.entry.library: one.request("peak")["peak_bytes"] for one in contenders}
    ours, theirs = (found[one.entry.name] for one in contenders)
    if failures := [one.failure for one in (ours, theirs) if one.failure]:
        raise SystemExit("; ".join(failures))
    results = {
        one.entry.library: _summary(found[one.entry.name])
        | {"peak_bytes": peaks[one.entry.library]}
        | {key: one.hello[key] for key in ("versions", "attention")}
        for one in contenders
    }
    return {"dtype": dtype, "layers": args.layers, "results": results, "ratio": ratio(theirs, ours)}


def _summary(measured: Measured) -> dict[str, Any]:
    foreign = measured.foreign_load
    return {
        "patches_per_s": round(PATCHES / measured.median_s, 1),
        "samples_s": [round(sample.seconds, 3) for sample in measured.samples],
        "first_s": round(measured.first_s, 2),
        "foreign_load": None if foreign is None else round(foreign, 3),
    }


def _claims(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """What a table says of one dtype; the samples stand beside it."""
    head = f"{cell['dtype']}, {cell['layers']} layers"
    rows = [
        {
            "what": f"{head}: {library} ({facts['attention']} attention)",
            "value": facts["patches_per_s"],
            "unit": " patches/s",
            "bound": ["reported", 0],
            **facts,
        }
        for library, facts in cell["results"].items()
    ]
    against = {"what": f"{head}: times as fast", "value": round(cell["ratio"], 3), "unit": "x"}
    return [*rows, {**against, "bound": ["at least", 1.0]}]


def write_record(cells: list[dict[str, Any]], args: argparse.Namespace) -> Path:
    """Writes the cells as the claims that `benchmarks.tables` shows, and returns the file's path."""
    loads = [facts["foreign_load"] for cell in cells for facts in cell["results"].values()]
    known = [load for load in loads if load is not None]
    versions = {library: facts["versions"] for library, facts in cells[0]["results"].items()}
    record = {
        "benchmark": "vision",
        "model": "Gemma 3's image tower, random weights",
        "dtype": " and ".join(cell["dtype"] for cell in cells),
        "tower": {**SIZES, "patches": PATCHES, "tokens": TOKENS},
        "environment": machine_record(args.threads, HUGE_PAGES if args.malloc == "huge" else "glibc's own"),
        "settings": {"repeats": args.repeats, "forced": args.force},
        "contenders": {name: {"library": name, "versions": found} for name, found in versions.items()},
        "foreign_load": max(known) if known else None,
        "claims": [claim for cell in cells for claim in _claims(cell)],
    }
    out = Path(args.out or ROOT / "benchmarks" / "results" / f"vision-jax{versions['jaxinfer']['jax']}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    cpus = pin_threads(args.threads)
    wait_until_quiet(cpus, args.max_foreign_load, 0 if args.force else args.patience_s)
    conditions = Conditions(cpus, args.repeats, float("inf"), args.max_foreign_load, args.force)
    cells = [measure_dtype(dtype, args, conditions) for dtype in args.dtypes]
    print(f"wrote {write_record(cells, args)}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vision", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--peer-python", metavar="PATH", help="transformers' interpreter; default: this one")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--malloc", choices=["huge", "plain"], default="huge")
    parser.add_argument("--max-foreign-load", type=float, default=0.1, help="cores that others may use")
    parser.add_argument("--patience-s", type=float, default=120)
    parser.add_argument("--force", action="store_true", help="measure whatever else runs")
    parser.add_argument("--out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
