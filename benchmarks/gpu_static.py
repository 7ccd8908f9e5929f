"""Static figures of the GPU kernels, compiled for a GPU that is not there, as JSON and as a table.

    python -m benchmarks.gpu_static [--target H200]

Needs the `gpu-aot` extra and no GPU: nothing here is a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("registers", "spill_bytes", "shared_bytes", "hgmma", "utmaldg", "instructions")


def measure(target: str) -> list[dict]:
    """Compiles every case in a process of its own and returns what it printed."""
    command = [sys.executable, "-m", "benchmarks.gpu_compile", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def table(rows: list[dict]) -> str:
    """The cases as a Markdown table, one kernel a line."""
    heads = ("kernel", *(name.replace("_", " ") for name in COLUMNS))
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---|" * len(COLUMNS)]
    for row in rows:
        for kernel in row["kernels"]:
            lines.append(f"| {row['case']} | " + " | ".join(f"{kernel[name]:,}" for name in COLUMNS) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="H200")
    args = parser.parse_args()
    rows = measure(args.target)
    path = RESULTS / f"gpu_static-{args.target}-jax{rows[0]['jax']}.json"
    record = {"benchmark": "gpu_static", "target": args.target, "jax": rows[0]["jax"], "cases": rows}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
