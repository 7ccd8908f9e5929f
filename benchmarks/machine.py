"""The machine that a benchmark runs on: what it is, and who else uses it meanwhile."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # of /proc/stat: user, nice, system, irq, softirq, steal
HUGE_PAGES = "glibc.malloc.hugetlb=1"


def pin_threads(threads: int) -> tuple[int, ...]:
    """Keeps this process and those it starts to `threads` CPUs, and returns their numbers.

    Thread pools are sized by the CPUs that a process may use, so every contender gets as many threads.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("benchmarks count threads by CPU affinity, which this platform does not have")
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= threads <= len(allowed):
        raise SystemExit(f"--threads must be in 1..{len(allowed)}, the CPUs of this process; got {threads}")
    os.sched_setaffinity(0, allowed[:threads])
    return tuple(allowed[:threads])


def machine_record(threads: int, malloc: str) -> dict[str, Any]:
    """Returns what a result must say of where it comes from; nothing in it names a path."""
    return {
        "cpu": cpu_model(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "threads": threads,
        "malloc": malloc,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **_commit(),
    }


def cpu_model() -> str:
    """Returns the CPU's name and what its matrix units can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", "").split())
    units = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{fields.get('model name', 'unknown')} ({', '.join(units) or 'no AVX2'})"


def worker_environment(malloc: str) -> dict[str, str]:
    """Returns the environment of a measured process: this repository importable, malloc set as asked."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), environment.get("PYTHONPATH")) if part
    )
    # Peers read one local file: no progress on stderr, no questions to a server.
    environment |= {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("GLIBC_TUNABLES", None)
    if malloc == "huge":
        environment["GLIBC_TUNABLES"] = HUGE_PAGES
    return environment


def _commit() -> dict[str, Any]:
    def git(*arguments: str) -> str | None:
        try:
            found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "jaxinfer", "pallas_kernels")
    return {"commit": git("rev-parse", "HEAD"), "library_changed_since": bool(changed)}


@dataclasses.dataclass(frozen=True)
class Load:
    """What ran on the measured CPUs beside the measured processes.

    Attributes:
      wall_s: how long it was watched.
      foreign_s: CPU seconds of others, time stolen by a hypervisor included; None where unknown.
    """

    wall_s: float
    foreign_s: float | None

    def exceeds(self, cores: float) -> bool:
        """Returns whether others used more than `cores`, beyond what the clock's ticks can show."""
        return self.foreign_s is not None and self.foreign_s > cores * self.wall_s + 3 * _TICK_S


class LoadMeter:
    """Watches CPUs from its creation on; `read` says what processes other than `own` used of them."""

    def __init__(self, cpus: Iterable[int], own: Iterable[int] = ()):
        self._cpus, self._own = tuple(cpus), (os.getpid(), *own)
        self._start = self._now()

    def read(self, ended_s: float = 0.0) -> Load:
        """Returns the load since the meter was made.

        Args:
          ended_s: CPU seconds of own processes that have come and gone since.
        """
        wall, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        if sys.platform != "linux":
            return Load(wall, None)
        return Load(wall, max(0.0, busy - own - ended_s))

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), _busy_s(self._cpus), sum(_process_s(pid) for pid in self._own)


def wait_until_quiet(cpus: Iterable[int], limit: float, patience_s: float) -> float | None:
    """Returns the foreign load in cores as soon as it is at most `limit`, the last one after `patience_s`."""
    end = time.perf_counter() + patience_s
    while True:
        meter = LoadMeter(cpus)
        time.sleep(2)
        load = meter.read()
        if load.foreign_s is None or not load.exceeds(limit) or time.perf_counter() > end:
            return None if load.foreign_s is None else load.foreign_s / load.wall_s


def _busy_s(cpus: tuple[int, ...]) -> float:
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    wanted = {f"cpu{cpu}" for cpu in cpus}
    rows = [line.split() for line in lines if line.split(maxsplit=1)[:1] and line.split()[0] in wanted]
    return _TICK_S * sum(int(row[1 + field]) for row in rows for field in _BUSY_FIELDS)


def _process_s(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()  # a process name may hold spaces
    return _TICK_S * (int(fields[11]) + int(fields[12]))
