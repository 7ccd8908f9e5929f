"""A GGUF file as a tensor source with Hugging Face names.

Two conventions of the format are handled here. The rows of q and k in `llama` files are permuted for
interleaved rope; reading undoes it. The norm scales in `gemma3` files already hold the +1 of the
family's 1 + w; they are given as stored, and `norm_scales_include_one` says so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.loading.dequantize import dequantize_rows
from jaxinfer.loading.gguf_config import ROPE_FACTORS_TENSOR, gguf_config
from jaxinfer.loading.gguf_format import GgufFile, GgufTensor, read_gguf
from jaxinfer.loading.tensor_source import CheckpointError, checked_dtype, read_by_row_blocks

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SHARED = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_BLOCK = {
    "llama": _SHARED | {"ffn_norm": "post_attention_layernorm"},
    "gemma3": _SHARED
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")


def hugging_face_name(arch: str, raw_name: str) -> str:
    """The Hugging Face name of a GGUF tensor; the raw name where there is none."""
    if match := _BLOCK_NAME.fullmatch(raw_name):
        layer, part, suffix = match.groups()
        if part in _BLOCK[arch]:
            return f"model.layers.{int(layer)}.{_BLOCK[arch][part]}.{suffix}"
    elif (match := _TOP_NAME.fullmatch(raw_name)) and match[1] in _TOP:
        return f"{_TOP[match[1]]}.{match[2]}"
    return raw_name


class GgufSource:
    """Tensors and config of one GGUF file; a `TensorSource`.

    `config` is a Hugging Face-like config dict; `file` gives the metadata for the tokenizer.
    """

    def __init__(self, path: str | Path):
        self.file: GgufFile = read_gguf(path)
        self.config: dict[str, Any] = gguf_config(self.file)
        self._arch: str = self.file.metadata["general.architecture"]
        self._raw_names: dict[str, str] = {}
        for raw_name in self.file.tensors:
            if raw_name == ROPE_FACTORS_TENSOR:
                continue  # consumed by the config
            name = hugging_face_name(self._arch, raw_name)
            if name in self._raw_names:
                raise CheckpointError(
                    f"{self.description}: {raw_name!r} and {self._raw_names[name]!r} are both {name!r}"
                )
            self._raw_names[name] = raw_name

    @property
    def description(self) -> str:
        return str(self.file.path)

    @property
    def norm_scales_include_one(self) -> bool:
        return self._arch == "gemma3"

    def names(self) -> frozenset[str]:
        return frozenset(self._raw_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[self._raw_name(name)].shape

    def read(
        self, name: str, dtype: np.dtype | type = np.float32, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The tensor [*shape], dequantised, in float32 or bfloat16; in `out` where given."""
        dtype = checked_dtype(f"read({name!r}, dtype=...)", dtype)
        tensor = self.file.tensors[self._raw_name(name)]
        order = self._row_order(name, tensor.shape)
        try:
            values = self._expanded(tensor, order, dtype, out)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.description}: tensor {tensor.name!r} is stored as {tensor.kind.name}, "
                "which cannot be read"
            ) from None
        self.file.mapped.let_go(self.file.tensor_rows(tensor))
        return values

    def _expanded(
        self, tensor: GgufTensor, order: np.ndarray | None, dtype: np.dtype, out: np.ndarray | None
    ) -> np.ndarray:
        stored = self.file.tensor_rows(tensor)
        is_vector = len(tensor.shape) == 1  # stored as one row

        def rows_of(start: int, end: int) -> np.ndarray:
            if order is None or is_vector:
                rows = stored[start:end]
                values = dequantize_rows(rows, tensor.kind)
                self.file.mapped.let_go(rows)
                return values if order is None else values[:, order]
            return dequantize_rows(stored[order[start:end]], tensor.kind)

        flat = read_by_row_blocks((len(stored), tensor.shape[-1]), dtype, rows_of, out=out)
        return flat.reshape(tensor.shape)

    def _raw_name(self, name: str) -> str:
        try:
            return self._raw_names[name]
        except KeyError:
            raise CheckpointError(f"{self.description}: has no tensor {name!r}") from None

    def _row_order(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """Stored row of each Hugging Face row: (head, half s, i) is stored at (head, i, half s)."""
        part = name.split(".")[-2] if "." in name else ""
        if self._arch != "llama" or part not in ("q_proj", "k_proj"):
            return None
        head_dim = self.config["head_dim"]
        if shape[0] % head_dim:
            raise CheckpointError(
                f"{self.description}: tensor {self._raw_name(name)!r} has {shape[0]} rows, not a multiple of "
                f"the head size {head_dim}"
            )
        return np.arange(shape[0]).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
