"""What the images that an input names hold, as one digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jaxinfer.batch.lines import read_lines
from jaxinfer.batch.request import BadRow, Defaults, parse_row

_READ_BYTES = 1 << 20


def images_digest(input_path: Path) -> str | None:
    """Returns the SHA-256, as hex, of the files that rows name in `images`, in order; None where none does.

    A file that cannot be read counts as that: a job goes on while it is still missing. Rows without images
    cost a search for the field's name.
    """
    digest, names_any = hashlib.sha256(), False
    known: dict[Path, bytes] = {}
    for number, line in enumerate(read_lines(input_path), 1):
        if b'"images"' not in line:
            continue
        request = parse_row(line, number, Defaults())
        for path in () if isinstance(request, BadRow) else request.images:
            file = input_path.parent / path
            if file not in known:
                known[file] = _file_digest(file)
            digest.update(known[file])
            names_any = True
    return digest.hexdigest() if names_any else None


def _file_digest(file: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    except (OSError, ValueError):
        return b"unreadable".ljust(digest.digest_size)
    return digest.digest()
