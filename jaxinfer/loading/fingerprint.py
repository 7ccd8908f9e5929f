"""Content hashes of files, remembered beside them.

A digest is kept in `.<name>.sha256` next to the file, with the size and modification time it was taken
at, and counts only while both still hold. Where that cannot be written the digest is taken anew each
time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path

_READ_BYTES = 1 << 20


def content_fingerprint(paths: Iterable[str | Path]) -> str:
    """Hex digest of the contents of files, in the order given; names do not count."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(bytes.fromhex(file_digest(path)))
    return digest.hexdigest()


def file_digest(path: str | Path) -> str:
    """The SHA-256 of a file in hex, from the note beside it while that still holds."""
    path = Path(path)
    before = os.stat(path)
    note = _note_path(path)
    known = _read_note(note)
    if known.get("size") == before.st_size and known.get("mtime_ns") == before.st_mtime_ns:
        return known["sha256"]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    after = os.stat(path)
    if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
        remember_digest(path, digest.hexdigest())
    return digest.hexdigest()


def remember_digest(path: Path, sha256: str) -> None:
    """Notes a digest that the caller has just computed for the file as it is now."""
    stat = os.stat(path)
    note = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
    with contextlib.suppress(OSError):  # a read-only folder: the digest is taken anew next time
        write_atomically(_note_path(path), json.dumps(note).encode())


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a small file so that readers see the old content or the new, never a part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _note_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.sha256")


def _read_note(path: Path) -> dict:
    try:
        note = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    valid = isinstance(note, dict) and isinstance(note.get("sha256"), str) and len(note["sha256"]) == 64
    return note if valid else {}
