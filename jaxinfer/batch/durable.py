"""Files that survive a kill: what has been written is on the disk before anything is built on it.

Whatever goes wrong is a `BatchFileError` of one line that names the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

_READ_BYTES = 1 << 20
_BINARY = getattr(os, "O_BINARY", 0)  # Windows would translate newlines


class BatchFileError(Exception):
    """A file that cannot be written or read, or that another process is writing; the message is one line."""


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BatchFileError(f"{path}: {error.strerror or error}") from error


class AppendFile:
    """A file that only grows, each piece on the disk before `append` returns; a lock keeps others from it.

    The lock ends with the process, however that ends. Windows has none of this kind: two jobs that write one
    file there are not noticed.

    Raises:
      BatchFileError: it cannot be opened, is no regular file, or another process holds it.
    """

    def __init__(self, path: Path):
        self._path = path
        with _told(path):
            if path.exists() and not stat.S_ISREG(os.stat(path).st_mode):
                raise BatchFileError(f"{path} is not a regular file")
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _BINARY, 0o666)
            if sys.platform != "win32":
                import fcntl

                try:
                    fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(self._handle)
                    raise BatchFileError(f"{path}: another process is writing it") from None

    def append(self, data: bytes) -> None:
        """Writes `data` behind what is there."""
        with _told(self._path):
            _write_all(self._handle, data)

    def truncate(self, num_bytes: int) -> None:
        """Drops what is beyond `num_bytes`."""
        with _told(self._path):
            os.ftruncate(self._handle, num_bytes)
            os.fsync(self._handle)

    def sha256_of_first(self, num_bytes: int) -> hashlib._Hash | None:
        """Returns the digest, still open, of the first `num_bytes`; None where there are fewer."""
        digest = hashlib.sha256()
        with _told(self._path), self._path.open("rb") as file:
            while num_bytes and (block := file.read(min(num_bytes, _READ_BYTES))):
                digest.update(block)
                num_bytes -= len(block)
        return None if num_bytes else digest

    def close(self) -> None:
        os.close(self._handle)


def replace_file(path: Path, data: bytes) -> None:
    """Gives a file new content: after a kill at any moment it has the old or the new."""
    temporary = path.with_name(f"{path.name}.tmp")
    with _told(path):
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, 0o666)
            try:
                _write_all(handle, data)
            finally:
                os.close(handle)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
    os.fsync(handle)


def _sync_folder(folder: Path) -> None:
    """Makes a new name in a folder durable; Windows does so by itself."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
