"""From the start of a process to its first token: what someone waits who types a command."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, LoadMeter, worker_environment

PROMPT = "What is the capital of France?"
_TIMEOUT_S = 600
_CLI = "import sys; from jaxinfer.cli import main; sys.exit(main())"


def time_starts(
    model: str, dtype: str, peers: Mapping[str, Sequence[str]], *, repeats: int, cpus: tuple[int, ...]
) -> dict[str, Any]:
    """Returns, by what is started, the seconds to its first output; all interleaved.

    Args:
      model: as `--model` takes it.
      peers: commands that print one JSON object as soon as their first token is there, by name.

    Returns:
      `import jax` alone; `jaxinfer, cold` with an empty compile cache (and how many programs it keeps
      there); `jaxinfer, warm` with the cache that the cold start left; each peer.
    """
    own = [sys.executable, "-c", _CLI, "generate", PROMPT, "--model", model, "--dtype", dtype]
    own += ["--max-new-tokens", "1", "--json"]
    starts = _Starts(cpus)
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            compiled = {"JAX_COMPILATION_CACHE_DIR": cache}
            starts.run("jaxinfer, cold", own, compiled)
            kept = sum(path.name.endswith("-cache") for path in Path(cache).iterdir())
            starts.run("jaxinfer, warm", own, compiled)
        starts.run("import jax", [sys.executable, "-c", "import jax; print('{}')"])
        for name, command in peers.items():
            starts.run(name, command)
    return {"prompt": PROMPT, "dtype": dtype, "programs_kept": kept, "starts": starts.record()}


class _Starts:
    def __init__(self, cpus: tuple[int, ...]):
        self._cpus = cpus
        self._found: dict[str, list[dict[str, Any]]] = {}

    def run(self, name: str, command: Sequence[str], extra: dict[str, str] | None = None) -> None:
        """Starts a process, waits for its first line, and keeps the time and what it said."""
        meter = LoadMeter(self._cpus)
        # Commands set malloc themselves where they want to: that belongs to their start.
        environment = worker_environment("plain") | (extra or {})
        with tempfile.TemporaryFile("w+") as log:
            began = time.perf_counter()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
            watchdog = threading.Timer(_TIMEOUT_S, process.kill)
            watchdog.start()
            line = process.stdout.readline()
            seconds = time.perf_counter() - began
            process.stdout.close()
            _, status, usage = os.wait4(process.pid, 0)
            watchdog.cancel()
            process.returncode = os.waitstatus_to_exitcode(status)
            load = meter.read(ended_s=usage.ru_utime + usage.ru_stime)
            if process.returncode != 0 or not line:
                log.seek(0)
                problem = " ".join(log.read().split())[-500:]
                raise RuntimeError(f"{name} ended with {process.returncode}: {problem or 'no output'}")
        foreign = None if load.foreign_s is None else load.foreign_s / load.wall_s
        said = json.loads(line)
        self._found.setdefault(name, []).append({"s": seconds, "foreign_load": foreign, "said": said})

    def record(self) -> dict[str, Any]:
        return {
            name: {
                "median_s": round(statistics.median(run["s"] for run in runs), 3),
                "samples_s": [round(run["s"], 3) for run in runs],
                "foreign_load": _worst(run["foreign_load"] for run in runs),
                **_parts(runs[-1]["said"]),
            }
            for name, runs in self._found.items()
        }


def _worst(loads: Any) -> float | None:
    known = [load for load in loads if load is not None]
    return round(max(known), 3) if known else None


def _parts(said: dict[str, Any]) -> dict[str, Any]:
    """Returns what a command said of itself: its first token, and where its time went."""
    kept: dict[str, Callable[[Any], Any]] = {"token_ids": list, "num_prompt_tokens": int, "timings": dict}
    return {key: shape(said[key]) for key, shape in kept.items() if key in said}
