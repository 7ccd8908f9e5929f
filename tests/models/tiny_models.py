"""The tiny oracles of `tests/oracles` as models: their weights, read as a checkpoint's would be."""

from __future__ import annotations

import functools

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.models import DecoderParams, VisionParams, assemble_params, assemble_vision, family_of
from tests.oracles import tiny_checkpoints


class DictTensors:
    """A checkpoint's tensors, held in a dict."""

    description = "checkpoint"

    def __init__(self, tensors: dict[str, np.ndarray], *, norm_scales_include_one: bool = False):
        self.tensors, self.norm_scales_include_one = tensors, norm_scales_include_one

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, dtype: np.dtype | type, out: np.ndarray | None = None) -> np.ndarray:
        values = self.tensors[name].astype(dtype)
        if out is None:
            return values
        out[:] = values.reshape(out.shape)
        return out


def read_config(name: str) -> ModelConfig:
    """The config of oracle `name`, float32."""
    raw = tiny_checkpoints.load_oracle(name).config
    return family_of(raw).read_config(raw)


def assemble(name: str, tensors: DictTensors) -> DecoderParams:
    """The params that `tensors` make under the config of oracle `name`."""
    raw = tiny_checkpoints.load_oracle(name).config
    return assemble_params(read_config(name), family_of(raw), tensors)


@functools.cache
def tiny_tower(name: str) -> VisionParams:
    """The image tower of oracle `name`."""
    raw, tensors = tiny_checkpoints.load_oracle(name).config, tiny_checkpoints.tiny_weights(name)
    return assemble_vision(read_config(name), family_of(raw), DictTensors(tensors))


@functools.cache
def tiny_params(name: str) -> DecoderParams:
    """The params of oracle `name`."""
    return assemble(name, DictTensors(tiny_checkpoints.tiny_weights(name)))
