"""GGUF metadata to a config dict in the layout of a Hugging Face `config.json`.

Keys of the metadata that would change the computation and have no counterpart here are refused,
never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from jaxinfer.loading.dequantize import dequantize_rows
from jaxinfer.loading.gguf_format import GgufFile
from jaxinfer.loading.tensor_source import CheckpointError

ROPE_FACTORS_TENSOR = "rope_freqs.weight"

# Gemma 3 files do not carry these: the base of the sliding layers' rope and which layers slide.
GEMMA3_LOCAL_ROPE_THETA = 10_000.0
GEMMA3_SLIDING_PATTERN = 6
GEMMA3_27B_LAYERS = 62

# The published Llama 3.1 to 3.3 checkpoints share these; only the factor (8 or 32) differs.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_POSITIONS = 8192

# Metadata that changes the computation, with the value that leaves it unchanged.
_NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "attn_logit_softcapping": 0.0,
}


class _Metadata:
    """Typed access to one architecture's keys; every failure names file and key."""

    def __init__(self, file: GgufFile):
        self.file = file
        arch = file.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(f"{file.path}: metadata 'general.architecture' is missing")
        self.arch = arch

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"metadata '{self.arch}.{key}' must be a positive integer; got {_brief(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.error(f"metadata '{self.arch}.{key}' must be a positive number; got {_brief(value)}")
        return shortest(value)


def _brief(value: Any) -> str:
    return f"an array of {len(value)}" if isinstance(value, (np.ndarray, list)) else repr(value)


def shortest(value: float) -> float:
    """The shortest decimal that a stored float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """A Hugging Face-like config dict of a GGUF file.

    Raises:
        CheckpointError: an architecture, rope kind or metadata value that is not supported.
    """
    meta = _Metadata(file)
    builder = _BUILDERS.get(meta.arch)
    if builder is None:
        raise meta.error(
            f"architecture {meta.arch!r} is not supported; known: {', '.join(sorted(_BUILDERS))}"
        )
    for key, neutral in _NEUTRAL.items():
        value = meta.get(key, neutral)
        if isinstance(value, np.ndarray) or value != neutral:
            raise meta.error(f"metadata '{meta.arch}.{key}' = {_brief(value)} is not supported")
    return builder(meta)


def _shared(meta: _Metadata) -> dict[str, Any]:
    num_heads = meta.integer("attention.head_count")
    embed_dim = meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", embed_dim // num_heads)
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise meta.error("keys and values of different sizes are not supported")
    if meta.integer("rope.dimension_count", head_dim) != head_dim:
        raise meta.error(f"rope over {meta.get('rope.dimension_count')} of {head_dim} dims is not supported")
    config = {
        "hidden_size": embed_dim,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocab_size(meta),
        "tie_word_embeddings": "output.weight" not in meta.file.tensors,
        "dtype": _dtype(meta.file),
    }
    for name in ("bos", "eos", "pad"):
        key = f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id"
        config[f"{name}_token_id"] = meta.file.metadata.get(key)
    return config


def _vocab_size(meta: _Metadata) -> int:
    embedding = meta.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise meta.error("tensor 'token_embd.weight' is missing or not a matrix")
    return embedding.shape[0]


def _dtype(file: GgufFile) -> str:
    """float32 when every matrix is stored so, else bfloat16 (float16 overflows in these models)."""
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    return "float32" if all(t.kind == GGMLQuantizationType.F32 for t in matrices) else "bfloat16"


def _llama(meta: _Metadata) -> dict[str, Any]:
    config = _shared(meta)
    if meta.get("attention.sliding_window", 0):
        raise meta.error("metadata 'llama.attention.sliding_window' is not supported")
    theta = meta.number("rope.freq_base", 10_000.0)
    rope = _scaled_rope(meta, theta)
    factors = meta.file.tensors.get(ROPE_FACTORS_TENSOR)
    if factors is not None:
        if rope["rope_type"] != "default":
            raise meta.error(f"tensor '{ROPE_FACTORS_TENSOR}' beside rope scaling {rope['rope_type']!r}")
        rope = _llama3_rope(meta, theta, config["head_dim"])
    return config | {"model_type": "llama", "hidden_act": "silu", "rope_parameters": rope}


def _gemma3(meta: _Metadata) -> dict[str, Any]:
    config = _shared(meta)
    num_layers = config["num_hidden_layers"]
    if ROPE_FACTORS_TENSOR in meta.file.tensors:
        raise meta.error(f"tensor '{ROPE_FACTORS_TENSOR}' is not supported in a gemma3 file")
    # Gemma 3 27B alone scales by the embedding share of a head; the file does not say so.
    scale_by_share = num_layers == GEMMA3_27B_LAYERS
    share = config["hidden_size"] // config["num_attention_heads"]
    local_theta = meta.number("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_THETA)
    soft_cap = meta.get("final_logit_softcapping", 0.0)
    return config | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": share if scale_by_share else config["head_dim"],
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": _gemma3_layer_types(meta, num_layers),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
            "full_attention": _scaled_rope(meta, meta.number("rope.freq_base", 1_000_000.0)),
        },
        "final_logit_softcapping": shortest(soft_cap) if soft_cap else None,
        "attn_logit_softcapping": None,
    }


def _gemma3_layer_types(meta: _Metadata, num_layers: int) -> list[str]:
    pattern = meta.get("attention.sliding_window_pattern", GEMMA3_SLIDING_PATTERN)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != num_layers:
            raise meta.error(f"sliding_window_pattern has {len(pattern)} entries for {num_layers} layers")
        slides = [bool(entry) for entry in pattern]
    elif isinstance(pattern, int) and pattern >= 1:
        slides = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        raise meta.error(f"sliding_window_pattern must be a positive integer; got {pattern!r}")
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _scaled_rope(meta: _Metadata, theta: float) -> dict[str, Any]:
    kind = meta.get("rope.scaling.type", "none")
    legacy = meta.get("rope.scale_linear")
    if kind == "none" and legacy in (None, 1, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear" or (kind == "none" and legacy is not None):
        factor = meta.number("rope.scaling.factor", legacy)
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise meta.error(f"rope scaling {kind!r} is not supported; known: none, linear")


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """The divisors of the inverse frequencies under the Llama 3.1 rule, float64 [head_dim / 2]."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = LLAMA3_ORIGINAL_POSITIONS * frequencies / (2 * np.pi)
    smooth = (turns - LLAMA3_LOW_FREQ_FACTOR) / (LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _llama3_rope(meta: _Metadata, theta: float, head_dim: int) -> dict[str, Any]:
    """The file stores the finished table; the rule is recovered and held against all of it."""
    tensor = meta.file.tensors[ROPE_FACTORS_TENSOR]
    stored = dequantize_rows(meta.file.tensor_rows(tensor), tensor.kind).astype(np.float64).ravel()
    if stored.shape != (head_dim // 2,):
        raise meta.error(
            f"tensor '{ROPE_FACTORS_TENSOR}' must have {head_dim // 2} values; got {stored.size}"
        )
    factor = float(stored.max())
    expected = llama3_factors(theta, head_dim, factor) if factor > 0 else stored + 1
    if not np.allclose(stored, expected, rtol=1e-4, atol=0):
        raise meta.error(f"tensor '{ROPE_FACTORS_TENSOR}' does not follow the Llama 3.1 rule: not supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": shortest(factor),
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_POSITIONS,
    }


_BUILDERS: dict[str, Callable[[_Metadata], dict[str, Any]]] = {"llama": _llama, "gemma3": _gemma3}
