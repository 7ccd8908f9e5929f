"""A checkpoint to a `Model`, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.loading.cache import resolve
from jaxinfer.loading.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.loading.converted import converted_path, read_converted, write_converted
from jaxinfer.loading.gguf import GgufSource
from jaxinfer.loading.tensor_source import CheckpointError

if TYPE_CHECKING:
    from jaxinfer.config import ModelConfig
    from jaxinfer.models import DecoderParams, Model
    from jaxinfer.models.family import Family
    from jaxinfer.state import KvWindowPolicy


def load(
    name_or_path: str | Path, *, dtype: str | None = None, kv_window: KvWindowPolicy | None = None
) -> Model:
    """Returns the model of a known name, a directory with safetensors, or a .gguf file.

    Args:
      dtype: of the weights, "float32", "bfloat16" or "int8"; None: the checkpoint's own as its config says,
        or as its tensors are stored; bfloat16 for a quantised GGUF file and for float16, which overflows in
        these models. "int8" stores matrices as int8 with a scale for each output channel, the embedding
        among them; everything else is as in bfloat16, an image tower too.
      kv_window: whether sliding layers drop rows behind their window; None: as the environment variable
        `JAXINFER_KV_WINDOW` says, read now.

    Raises:
      CheckpointError: a file that cannot be loaded as it is, tensors that do not fit the config, an unknown
        architecture or rope type; the message names the file.
      ModelNotPulledError: a known model that is not in the cache: `jaxinfer pull` fetches it.
    """
    # Imported here: these import jax, which the rest of this package does without.
    from jaxinfer.config import WEIGHT_DTYPES
    from jaxinfer.models import Model, WeightsError, assemble_vision, family_of
    from jaxinfer.state import KvWindowPolicy

    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ValueError(f"load(dtype=...) must be one of {WEIGHT_DTYPES} or None; got {dtype!r}")
    path = resolve(name_or_path)
    checkpoint = open_checkpoint(path)
    try:
        family = family_of(checkpoint.config)
        config = family.read_config(checkpoint.config)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    config = config.with_weight_dtype(dtype or own_dtype(checkpoint.config))
    try:
        params = _decoder_params(config, family, checkpoint)
        vision = assemble_vision(config, family, checkpoint.source)
    except WeightsError as error:
        raise CheckpointError(str(error)) from error
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{path}: holds no tokenizer")
    return Model(
        config=config,
        params=params,
        tokenizer=tokenizer,
        chat_template=checkpoint.chat_template,
        fingerprint=checkpoint.fingerprint,
        kv_window=KvWindowPolicy.from_env() if kv_window is None else kv_window,
        vision=vision,
    )


def _decoder_params(config: ModelConfig, family: Family, checkpoint: Checkpoint) -> DecoderParams:
    """Returns the decoder's weights; those of a GGUF file are converted once and mapped from then on."""
    from jaxinfer.models import assemble_params, param_shapes

    if not isinstance(checkpoint.source, GgufSource):  # others are stored as they are used: read them
        return assemble_params(config, family, checkpoint.source)
    path = converted_path(checkpoint.fingerprint, config.weight_dtype)
    kept = read_converted(path, param_shapes(config))
    if kept is not None:
        return kept
    params = assemble_params(config, family, checkpoint.source)
    write_converted(path, params)
    return params


def own_dtype(raw: dict) -> str:
    """Returns the dtype that a checkpoint's weights load in by default."""
    # float16 checkpoints overflow in these models; bfloat16 has float32's range at the same size.
    own = raw.get("dtype") or raw.get("torch_dtype")
    return "float32" if own == "float32" else "bfloat16"
