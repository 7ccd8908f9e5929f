"""One checkpoint on disk: where its tensors, config and tokenizer come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxinfer.loading.gguf import GgufSource
from jaxinfer.loading.gguf_tokenizer import gguf_tokenizer
from jaxinfer.loading.tensor_source import CheckpointError, TensorSource
from jaxinfer.loading.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `config` is in the layout of a Hugging Face `config.json`."""

    source: TensorSource
    config: dict[str, Any]
    tokenizer: Tokenizer


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a .gguf file; tensors are read later, one at a time.

    Raises:
        CheckpointError: what is there cannot be loaded as it is.
        FileNotFoundError: nothing is there.
    """
    path = Path(path)
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: is not a .gguf file")
    source = GgufSource(path)
    return Checkpoint(source, source.config, gguf_tokenizer(source.file))
