"""Params kept on disk as they lie in memory, so that the next load maps them instead of converting.

One safetensors file for each (content fingerprint, dtype, format, library code), in the cache directory.
The header is padded so that data begins at a multiple of 64 bytes: a CPU device then takes the mapped pages
without a copy. A file is written under another name and renamed, and never changed afterwards, so pages that
a process has mapped stay valid when another replaces or removes the file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import mmap
import os
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ml_dtypes
import numpy as np

from jaxinfer.loading.cache import cache_dir

if TYPE_CHECKING:
    import jax

_Params = TypeVar("_Params")

# Changes whenever the same checkpoint would give other params, or the file another layout.
_FORMAT = "1"
_ALIGNMENT = 64  # bytes, XLA's on a CPU
_LENGTH = struct.Struct("<Q")  # of the header, which follows it

_NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.int8): "I8",
}

_logger = logging.getLogger(__name__)


def converted_path(fingerprint: str, dtype: str) -> Path:
    """Where the params of a checkpoint with this content lie once they are converted to `dtype`."""
    key = hashlib.sha256("\0".join((fingerprint, dtype, _FORMAT, _code_digest())).encode())
    return cache_dir() / "converted" / f"{key.hexdigest()}.safetensors"


def read_converted(path: Path, shapes: _Params) -> _Params | None:
    """Returns the params in a file; None where there is none, or where it is not exactly of `shapes`.

    Args:
      shapes: the pytree with `jax.ShapeDtypeStruct` leaves.
    """
    import jax

    leaves, structure = jax.tree.flatten(shapes)
    expected = _header(shapes)
    try:
        with path.open("rb") as file:
            if file.read(len(expected)) != expected:
                return None
            size = len(expected) + sum(_num_bytes(leaf) for leaf in leaves)
            if os.fstat(file.fileno()).st_size != size:
                return None
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError:
        return None
    arrays: list[Any] = [None] * len(leaves)
    start = len(expected)
    for index in _order(leaves):
        leaf = leaves[index]
        stored = data[start : start + _num_bytes(leaf)]
        arrays[index] = jax.device_put(stored.view(leaf.dtype).reshape(leaf.shape))
        start += stored.nbytes
    return jax.tree.unflatten(structure, arrays)


def write_converted(path: Path, params: Any) -> None:
    """Keeps params for the next load; where the disk is full or read-only, says so once and goes on."""
    import jax

    leaves = jax.tree.leaves(params)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(_header(params))
                for index in _order(leaves):
                    file.write(np.ascontiguousarray(leaves[index]).reshape(-1).view(np.uint8).data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        _say_once(str(path.parent), error.strerror or str(error))


@functools.lru_cache
def _say_once(folder: str, problem: str) -> None:
    _logger.warning("converted weights are not kept in %s: %s; every load converts anew", folder, problem)


def _order(leaves: list[jax.Array]) -> list[int]:
    """Returns leaf numbers as stored: those that would move later ones off the alignment come last."""
    return sorted(range(len(leaves)), key=lambda index: _num_bytes(leaves[index]) % _ALIGNMENT != 0)


def _header(params: Any) -> bytes:
    import jax

    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    leaves = jax.tree.leaves(params)
    entries, start = {}, 0
    for index in _order(leaves):
        leaf, end = leaves[index], start + _num_bytes(leaves[index])
        name = _NAMES[np.dtype(leaf.dtype)]
        entries[paths[index]] = {"dtype": name, "shape": list(leaf.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _num_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


@functools.cache
def _code_digest() -> str:
    """Covers what decides the params of a checkpoint, so that a changed library never reads old ones."""
    import jaxinfer.loading
    import jaxinfer.models
    import jaxinfer.ops

    digest = hashlib.sha256()
    for package in (jaxinfer.loading, jaxinfer.models, jaxinfer.ops):
        for path in sorted(Path(package.__path__[0]).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
