"""A directory of safetensors files as a tensor source.

A file is a little-endian u64 header length, a JSON header (name -> dtype, shape, [begin, end) in the data
that follows) and the data. Source: the format section of the safetensors README. Headers are checked
against the files' sizes when the source is made; data is mapped and read row block by row block.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.loading.mapped_file import MappedFile
from jaxinfer.loading.tensor_source import CheckpointError, checked_dtype, read_by_row_blocks

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_WEIGHTS = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class _Tensor:
    path: Path
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8, a part of `mapped`
    mapped: MappedFile


class SafetensorsSource:
    """Tensors of a directory with safetensors files; a `TensorSource`.

    With an index (`model.safetensors.index.json`) every file it names must be there and hold what it
    promises; without one, all *.safetensors files of the directory are taken.
    """

    norm_scales_include_one = False

    def __init__(self, directory: str | Path):
        """CheckpointError: no safetensors, a missing or damaged file, or an index that does not fit."""
        self._directory = Path(directory)
        index = self._directory / INDEX_NAME
        promised = _weight_map(index) if index.is_file() else None
        names = sorted(set(promised.values())) if promised else self._files_without_index()
        self.files: tuple[Path, ...] = tuple(self._directory / name for name in names)
        self._tensors: dict[str, _Tensor] = {}
        for path in self.files:
            if not path.is_file():
                raise CheckpointError(f"{path}: is missing, but {INDEX_NAME} names it")
            for name, tensor in _read_header(path).items():
                if name in self._tensors:
                    other = self._tensors[name].path.name
                    raise CheckpointError(f"{path}: tensor {name!r} is in {other} too")
                self._tensors[name] = tensor
        for name, file in (promised or {}).items():
            if name not in self._tensors or self._tensors[name].path.name != file:
                raise CheckpointError(
                    f"{self._directory / file}: lacks tensor {name!r}, which the index promises"
                )

    def _files_without_index(self) -> list[str]:
        names = sorted(path.name for path in self._directory.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"{self._directory}: holds no .safetensors file")
        return names

    @property
    def description(self) -> str:
        return str(self._directory)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def widest_dtype(self) -> str:
        """The dtype that holds every weight: "float32" where one is stored in it, else "bfloat16"."""
        kinds = {tensor.kind for tensor in self._tensors.values()}
        return "float32" if kinds & {"F32", "F64"} else "bfloat16"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(
        self, name: str, dtype: np.dtype | type = np.float32, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The tensor [*shape] in float32 or bfloat16, in `out` where given."""
        dtype = checked_dtype(f"read({name!r}, dtype=...)", dtype)
        tensor = self._tensor(name)
        if tensor.kind not in _WEIGHTS:
            raise CheckpointError(
                f"{tensor.path}: tensor {name!r} is stored as {tensor.kind}; "
                f"weights are {', '.join(_WEIGHTS)}"
            )
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        values = tensor.data.view(_DTYPES[tensor.kind]).reshape(rows, -1)
        flat = read_by_row_blocks(values.shape, dtype, lambda start, end: values[start:end], out=out)
        tensor.mapped.let_go(tensor.data)
        return flat.reshape(tensor.shape)

    def _tensor(self, name: str) -> _Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.description}: has no tensor {name!r}") from None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{index}: is not an index with a 'weight_map'") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name!r} lies in {file!r}, which is not a file name")
    return weight_map


def _read_header(path: Path) -> dict[str, _Tensor]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 8:
            raise CheckpointError(f"{path}: is {size} bytes long, not a safetensors file")
        mapped = MappedFile(file)
    data = mapped.data
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(_MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{path}: promises a header of {length} bytes, but the file ends at {size}: it is cut short or "
            "not a safetensors file"
        )
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except ValueError:
        raise CheckpointError(
            f"{path}: its header is not JSON: it is damaged or not a safetensors file"
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _located(path, name, entry, mapped, 8 + length) for name, entry in header.items()}


def _located(path: Path, name: str, entry: Any, mapped: MappedFile, data_start: int) -> _Tensor:
    data = mapped.data[data_start:]
    try:
        kind, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: the header entry of tensor {name!r} is damaged") from None
    if kind not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {kind!r}")
    if any(size < 1 for size in shape):
        raise CheckpointError(f"{path}: tensor {name!r} has a dimension of size 0: {list(shape)}")
    needed = math.prod(shape) * _DTYPES[kind].itemsize
    if begin < 0 or end - begin != needed:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(shape)} needs {needed} bytes, but its entry spans "
            f"{begin} to {end}"
        )
    if end > len(data):
        raise CheckpointError(
            f"{path}: tensor {name!r} needs data bytes {begin} to {end}, but the file holds {len(data)}: "
            "it is cut short; download it again"
        )
    return _Tensor(path, kind, shape, data[begin:end], mapped)
