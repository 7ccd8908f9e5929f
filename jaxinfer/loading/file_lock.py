"""An exclusive lock between processes and threads, held through a file and freed when its holder dies."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL_SECONDS = 0.1

if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(handle: int) -> None:
        os.lseek(handle, 0, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_UN)


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of `path`, which is created and left in place; `on_wait` runs while another has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        while not _try_lock(handle):
            on_wait()
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            _unlock(handle)
    finally:
        os.close(handle)
