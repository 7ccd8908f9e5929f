"""Small GGUF files, written with the `gguf` library, and the arrays that they should be read back as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 32, 64, 4, 2, 8, 2, 300

_SHARED_NAMES = {
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, EMBED)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, EMBED)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, EMBED)),
    "attn_output": ("self_attn.o_proj", (EMBED, HEADS * HEAD_DIM)),
    "ffn_gate": ("mlp.gate_proj", (MLP, EMBED)),
    "ffn_up": ("mlp.up_proj", (MLP, EMBED)),
    "ffn_down": ("mlp.down_proj", (EMBED, MLP)),
    "attn_norm": ("input_layernorm", (EMBED,)),
}
_NAMES = {
    "llama": _SHARED_NAMES | {"ffn_norm": ("post_attention_layernorm", (EMBED,))},
    "gemma3": _SHARED_NAMES
    | {
        "attn_q_norm": ("self_attn.q_norm", (HEAD_DIM,)),
        "attn_k_norm": ("self_attn.k_norm", (HEAD_DIM,)),
        "post_attention_norm": ("post_attention_layernorm", (EMBED,)),
        "ffn_norm": ("pre_feedforward_layernorm", (EMBED,)),
        "post_ffw_norm": ("post_feedforward_layernorm", (EMBED,)),
    },
}


def hugging_face_weights(arch: str, *, tied: bool = True) -> dict[str, np.ndarray]:
    """Random float32 weights under their Hugging Face names."""
    rng = np.random.default_rng(7)
    shapes = {"model.embed_tokens.weight": (VOCAB, EMBED), "model.norm.weight": (EMBED,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, EMBED)
    for layer in range(LAYERS):
        for name, shape in _NAMES[arch].values():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def raw_name(arch: str, name: str) -> str:
    """The GGUF name of a Hugging Face weight."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in top:
        return f"{top[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    raw = next(raw for raw, (known, _) in _NAMES[arch].items() if known == part)
    return f"blk.{layer}.{raw}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as `llama` files store them: pair i of a head (i, i + H/2) becomes rows 2i and 2i + 1."""
    rows = []
    size = len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            rows += [weight[head * size + i], weight[head * size + size // 2 + i]]
    return np.stack(rows)


def stored_weights(arch: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as a converter writes them: GGUF names, and `llama` rows interleaved."""
    stored = {}
    for name, weight in weights.items():
        if arch == "llama" and name.endswith("q_proj.weight"):
            weight = interleaved(weight, HEADS)
        if arch == "llama" and name.endswith("k_proj.weight"):
            weight = interleaved(weight, KV_HEADS)
        stored[raw_name(arch, name)] = weight
    return stored


def metadata(arch: str) -> dict[str, Any]:
    """Model metadata; a float becomes a float32, an int a uint32."""
    values = {
        "context_length": 128,
        "embedding_length": EMBED,
        "block_count": LAYERS,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
    }
    if arch == "gemma3":
        values["attention.sliding_window"] = 16
    return {f"{arch}.{key}": value for key, value in values.items()}


def write_gguf(
    path: Path,
    arch: str,
    tensors: dict[str, np.ndarray],
    *,
    values: dict[str, Any] | None = None,
    kinds: dict[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Writes tensors under GGUF names; `kinds` says how those that it names are quantised."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata(arch) if values is None else values).items():
        _add_value(writer, key, value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_tiny(path: Path, arch: str, **changes: Any) -> Path:
    """A whole tiny model without a tokenizer; `changes` are metadata values, None leaving a key out."""
    values = metadata(arch) | {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    values = {key: value for key, value in values.items() if value is not None}
    return write_gguf(path, arch, stored_weights(arch, hugging_face_weights(arch)), values=values)
