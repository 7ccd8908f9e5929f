"""Where pulled models lie, and which checkpoint a name stands for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jaxinfer.loading.fingerprint import file_digest
from jaxinfer.loading.hub import hub_snapshot, is_hub_id
from jaxinfer.loading.known_models import KNOWN_MODELS, KnownModel

CACHE_ENV = "JAXINFER_CACHE"


class ModelNotPulledError(FileNotFoundError):
    """A known model that is not in the cache yet. `name` is the model's."""

    def __init__(self, name: str):
        super().__init__(f"model {name!r} is not in {cache_dir()}: run `jaxinfer pull {name}`")
        self.name = name


def cache_dir() -> Path:
    """$JAXINFER_CACHE, else the platform's cache folder for jaxinfer (~/.cache/jaxinfer on Linux)."""
    if chosen := os.environ.get(CACHE_ENV):
        return Path(chosen).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "jaxinfer"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxinfer"


def model_path(model: KnownModel) -> Path:
    """Where the model's file lies once it is pulled."""
    return cache_dir() / "models" / model.name / model.filename


def is_pulled(model: KnownModel) -> bool:
    """True when the model's file is in the cache, whole and with the pinned digest."""
    path = model_path(model)
    return path.is_file() and path.stat().st_size == model.num_bytes and file_digest(path) == model.sha256


def resolve(name_or_path: str | Path) -> Path:
    """The checkpoint that a known name, a directory, a .gguf file or a hub id (`owner/name`) stands for.

    A known name wins over a directory of the same name: write `./name` for that. A hub id is fetched.

    Raises:
        ModelNotPulledError: a known model that is not in the cache.
        ValueError: nothing of these, or a hub id that could not be fetched.
    """
    if isinstance(name_or_path, str) and name_or_path in KNOWN_MODELS:
        model = KNOWN_MODELS[name_or_path]
        if not is_pulled(model):
            raise ModelNotPulledError(model.name)
        return model_path(model)
    path = Path(name_or_path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if isinstance(name_or_path, str) and is_hub_id(name_or_path):
        return hub_snapshot(name_or_path)
    problem = "is not a .gguf file" if path.is_file() else "does not exist"
    raise ValueError(
        f"model {str(name_or_path)!r} {problem}: pass a directory with safetensors, a .gguf file, a hub id "
        f"(owner/name) or a known name ({', '.join(KNOWN_MODELS)})"
    )
