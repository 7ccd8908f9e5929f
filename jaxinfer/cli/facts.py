"""What `jaxinfer info` reports, as plain values that JSON can hold."""

from __future__ import annotations

import collections
import importlib.metadata
import math
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.loading.cache import cache_dir, is_pulled, model_path, resolve
from jaxinfer.loading.known_models import KNOWN_MODELS
from jaxinfer.version import own_version

if TYPE_CHECKING:
    from jaxinfer.config import ModelConfig
    from jaxinfer.loading import Checkpoint


def environment_facts() -> dict[str, Any]:
    """Returns versions, devices, where things are kept, and which known models are there."""
    import jax

    from jaxinfer.ops import attention_implementations, gated_delta_implementations

    return {
        "attention": dict(attention_implementations()),
        "gated_delta": dict(gated_delta_implementations()),
        "versions": {
            "jaxinfer": own_version(),
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "python": platform.python_version(),
        },
        "devices": [
            {"id": device.id, "platform": device.platform, "kind": device.device_kind}
            for device in jax.devices()
        ],
        "cache": str(cache_dir()),
        "compiled_programs": jax.config.values["jax_compilation_cache_dir"],
        "pulled": [
            {"name": model.name, "path": str(model_path(model)), "file_bytes": model.num_bytes}
            for model in KNOWN_MODELS.values()
            if is_pulled(model)
        ],
    }


def model_facts(name: str, dtype: str | None) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the config that `load` would use, and what a checkpoint's header says; no weight is read.

    Raises what `jaxinfer.load` raises for a model that is not there or cannot be read.
    """
    from jaxinfer.loading import open_checkpoint

    path = resolve(name)
    checkpoint = open_checkpoint(path)
    config = _config(checkpoint, path, dtype)
    return config, {
        "name": name,
        "path": str(path),
        "family": config.family,
        "layers": dict(collections.Counter(layer.kind.value for layer in config.layers)),
        "windows": sorted({layer.window for layer in config.layers if layer.window is not None}),
        **_weights(config),
        "file_bytes": sum(file.stat().st_size for file in checkpoint.files),
        "dtype": config.weight_dtype,
        "embed_dim": config.embed_dim,
        "num_q_heads": config.num_q_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "chat_template": checkpoint.chat_template is not None,
        "licence": _licence(name, checkpoint),
    }


def _config(checkpoint: Checkpoint, path: Path, dtype: str | None) -> ModelConfig:
    """Returns the config that `load` would use."""
    from jaxinfer.loading import CheckpointError
    from jaxinfer.loading.load import own_dtype
    from jaxinfer.models import family_of

    try:
        config = family_of(checkpoint.config).read_config(checkpoint.config)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return config.with_weight_dtype(dtype or own_dtype(checkpoint.config))


def _weights(config: ModelConfig) -> dict[str, int]:
    import jax

    from jaxinfer.models import param_shapes
    from jaxinfer.ops import is_quantized

    shapes = param_shapes(config)
    weights, leaves = jax.tree.leaves(shapes, is_leaf=is_quantized), jax.tree.leaves(shapes)
    return {
        "num_params": sum(math.prod(weight.shape) for weight in weights),
        "params_bytes": sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves),
    }


def _licence(name: str, checkpoint: Checkpoint) -> str | None:
    """Returns the licence of a known model, or what a GGUF file says; None where nothing is said."""
    from jaxinfer.loading.gguf import GgufSource

    if name in KNOWN_MODELS:
        return KNOWN_MODELS[name].licence
    if isinstance(checkpoint.source, GgufSource):
        return checkpoint.source.file.metadata.get("general.license")
    return None
