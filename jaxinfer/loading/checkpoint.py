"""One checkpoint on disk: a GGUF file, or a directory in the Hugging Face layout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinfer.loading.chat_template import ChatTemplate
from jaxinfer.loading.directory_tokenizer import directory_chat_template, directory_tokenizer, read_json
from jaxinfer.loading.fingerprint import content_fingerprint
from jaxinfer.loading.gguf import GgufSource
from jaxinfer.loading.gguf_tokenizer import gguf_chat_template, gguf_tokenizer
from jaxinfer.loading.safetensors_source import SafetensorsSource
from jaxinfer.loading.tensor_source import CheckpointError, TensorSource
from jaxinfer.loading.tokenizer import Tokenizer

CONFIG_NAME = "config.json"
# Facts of the image preprocessor, under the key of the same name in `Checkpoint.config`; newer checkpoints
# have them inside the processor's config.
PREPROCESSOR_KEY = "preprocessor_config"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; tensors are read later, one at a time.

    Attributes:
        source: its tensors.
        config: in the layout of a Hugging Face `config.json`, whatever the file format; a directory's
            `preprocessor_config.json` stands under that key.
        files: what `fingerprint` covers: weights and config.
    """

    source: TensorSource
    config: dict[str, Any]
    files: tuple[Path, ...]
    build_tokenizer: Callable[[], Tokenizer | None]
    build_chat_template: Callable[[], ChatTemplate | None]

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Built on first use (up to two seconds for 262 144 tokens); None when there is none."""
        return self.build_tokenizer()

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """None when the checkpoint brings no template, as base models do."""
        return self.build_chat_template()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of weights and config; file digests are remembered beside the files."""
        return content_fingerprint(self.files)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a .gguf file, or a directory with `config.json` and safetensors files.

    Raises:
        CheckpointError: what is there cannot be loaded as it is; names the file and what is wrong.
        FileNotFoundError: nothing is there.
    """
    path = Path(path)
    return _open_directory(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: pass the directory of a safetensors file, which holds its config too")
    source = GgufSource(path)
    return Checkpoint(
        source=source,
        config=source.config,
        files=(path,),
        build_tokenizer=lambda: gguf_tokenizer(source.file),
        build_chat_template=lambda: gguf_chat_template(source.file),
    )


def _open_directory(path: Path) -> Checkpoint:
    config_path = path / CONFIG_NAME
    if not config_path.is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(ggufs)}: pass that file" if ggufs else ""
        raise CheckpointError(f"{path}: has no {CONFIG_NAME}{hint}")
    config = read_json(config_path)
    source = SafetensorsSource(path)
    if not (config.get("dtype") or config.get("torch_dtype")):
        config = config | {"dtype": source.widest_dtype()}
    preprocessor = read_json(path / f"{PREPROCESSOR_KEY}.json")
    preprocessor = preprocessor or read_json(path / "processor_config.json").get("image_processor")
    if preprocessor:
        config = config | {PREPROCESSOR_KEY: preprocessor}
    return Checkpoint(
        source=source,
        config=config,
        files=(config_path, *source.files),
        build_tokenizer=lambda: directory_tokenizer(path, config),
        build_chat_template=lambda: directory_chat_template(path),
    )
