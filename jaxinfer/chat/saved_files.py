"""A saved conversation on disk: a directory of one JSON file, and the arrays that the file names.

    conversation.json    the record, a checksum of itself and of every file with arrays
    state-<id>/          the arrays, by orbax

The JSON file is written last and replaced in one step, so a directory holds the conversation saved before or
the one saved now, and one in which a first save broke off holds none.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - makes "bfloat16" a name that numpy knows
import numpy as np

_RECORD, _ARRAYS, _CHECKSUM = "conversation.json", "arrays", "sha256"
_FOLDER_PREFIX = "state-"
_FORMAT = 1
_READ_BYTES = 1 << 20


class SavedChatError(ValueError):
    """What lies at a path cannot be loaded: nothing, a save that broke off, or a damaged one."""


def write_saved(path: Path, record: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Writes a record and its arrays, in place of what was saved at `path` before.

    Raises:
      ValueError: `path` is something else than a saved conversation, or the record holds what JSON cannot.
      ImportError: there are arrays and orbax-checkpoint is not installed.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        others = [entry.name for entry in path.iterdir() if not entry.name.startswith(_FOLDER_PREFIX)]
    except (FileExistsError, NotADirectoryError):
        others = [path.name]
    if others and _RECORD not in others:
        raise ValueError(f"ChatSession.save(path=...): {path} holds something else; name a new directory")
    earlier = _named_folder(path)
    folder = path / f"{_FOLDER_PREFIX}{secrets.token_hex(8)}"
    temporary = path / f"{folder.name}.json"
    body = {**record, "format": _FORMAT, _ARRAYS: None}
    try:
        json.dumps(body, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"ChatSession.save(): the conversation is not plain JSON: {error}") from error
    try:
        if arrays:
            body[_ARRAYS] = _write_arrays(folder, arrays)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({**body, _CHECKSUM: _checksum(body)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path / _RECORD)
    except BaseException:
        temporary.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if earlier is not None:
        shutil.rmtree(path / earlier, ignore_errors=True)


def read_record(path: Path) -> dict[str, Any]:
    """Returns the record saved at `path`; SavedChatError where there is no whole one."""
    try:
        body = json.loads((path / _RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SavedChatError(f"{path}: no conversation was saved here, or not to its end") from None
    except ValueError as error:
        raise SavedChatError(f"{path / _RECORD} is damaged: {error}") from error
    checksum = body.pop(_CHECKSUM, None) if isinstance(body, dict) else None
    if checksum is None or checksum != _checksum(body):
        raise SavedChatError(f"{path / _RECORD} is damaged: its checksum does not fit")
    if body["format"] != _FORMAT:
        raise SavedChatError(
            f"{path / _RECORD} has format {body['format']}; this version of jaxinfer reads {_FORMAT}"
        )
    return body


def read_arrays(path: Path, record: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the arrays that go with a record.

    Raises:
      SavedChatError: one is missing or is not what was saved.
      ImportError: orbax-checkpoint is not installed.
    """
    described = record[_ARRAYS]
    if described is None:
        return []
    folder = path / described["folder"]
    # Checked before orbax sees them: what it makes of damaged files is neither short nor always an error.
    for name, was in described["files"].items():
        try:
            damaged = _file_record(folder / name) != was
        except OSError:
            raise SavedChatError(f"{folder / name} is missing: the saved state is not whole") from None
        if damaged:
            raise SavedChatError(f"{folder / name} is damaged: it is not what was saved")
    shapes = [(tuple(leaf["shape"]), np.dtype(leaf["dtype"])) for leaf in described["leaves"]]
    checkpoint = _orbax()
    arguments = {
        str(index): checkpoint.RestoreArgs(restore_type=np.ndarray)
        for index, (shape, _) in enumerate(shapes)
        if 0 not in shape
    }
    with checkpoint.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(folder.absolute(), restore_args=arguments)
    return [found.get(str(index), np.zeros(*leaf)) for index, leaf in enumerate(shapes)]


def _write_arrays(folder: Path, arrays: Sequence[np.ndarray]) -> dict[str, Any]:
    """Writes arrays to a new folder and returns what the record holds of them."""
    # Orbax takes no array without elements.
    tree = {str(index): array for index, array in enumerate(arrays) if array.size}
    with _orbax().PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        "folder": folder.name,
        "files": {file.relative_to(folder).as_posix(): _file_record(file) for file in files},
        "leaves": [{"shape": list(array.shape), "dtype": array.dtype.name} for array in arrays],
    }


def _file_record(file: Path) -> dict[str, int]:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return {"size": file.stat().st_size, "crc32": checksum}


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _named_folder(path: Path) -> str | None:
    """Returns the folder of the conversation saved at `path` so far, None where there is none."""
    with contextlib.suppress(SavedChatError):
        described = read_record(path)[_ARRAYS]
        return None if described is None else described["folder"]
    return None


def _orbax() -> Any:
    if importlib.util.find_spec("orbax") is None:
        raise ImportError(
            "the state of a conversation is kept with orbax-checkpoint, which is not installed: "
            "pip install 'jaxinfer[checkpoint]'"
        )
    import orbax.checkpoint

    return orbax.checkpoint
