"""From a checkpoint's tensors to params: which tensors make which weight, all of them and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.params import DecoderParams, param_shapes
from jaxinfer.nn import AttentionParams, BlockParams, MlpParams

PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


class Tensors(Protocol):
    """The tensors of a checkpoint by Hugging Face name; see `jaxinfer.loading.TensorSource`."""

    @property
    def description(self) -> str: ...
    @property
    def norm_scales_include_one(self) -> bool: ...
    def names(self) -> frozenset[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, dtype: np.dtype | type) -> np.ndarray: ...


class WeightsError(ValueError):
    """Tensors of a checkpoint that are missing, extra or misshapen; the message names them."""


def assemble_params(config: ModelConfig, family: Family, tensors: Tensors) -> DecoderParams:
    """Returns the params of a checkpoint in `config.dtype`; nothing is ever filled in.

    Raises:
      WeightsError: a missing, extra or misshapen tensor.
    """
    reader = _Reader(config, family, tensors)
    recipe = _recipe(config, reader)
    reader.check(recipe)
    shapes = param_shapes(config)
    leaves, structure = jax.tree.flatten(shapes)
    makers = structure.flatten_up_to(recipe)
    # Reading is numpy work that frees the interpreter lock; two threads also overlap it with the device copy.
    with ThreadPoolExecutor(2) as pool:
        arrays = list(pool.map(lambda pair: pair[0].make(pair[1]), zip(makers, leaves, strict=True)))
    return jax.tree.unflatten(structure, arrays)


class _Weight:
    """One leaf: the tensors that make it, their shapes, and how they are put together."""

    def __init__(
        self,
        reader: _Reader,
        names: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
        join: Callable[[list[np.ndarray]], np.ndarray] = lambda parts: parts[0],
    ):
        self.reader, self.names, self.shapes, self.join = reader, names, shapes, join

    def make(self, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        parts = [self.reader.tensors.read(name, np.dtype(leaf.dtype)) for name in self.names]
        return jnp.asarray(self.join(parts).reshape(leaf.shape))


class _Scale(_Weight):
    """A norm scale, stored as the family stores it."""

    def make(self, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return super().make(leaf) + np.float32(self.reader.scale_offset)


class _Reader:
    """The tensors of one checkpoint under one prefix."""

    def __init__(self, config: ModelConfig, family: Family, tensors: Tensors):
        self.config, self.family, self.tensors = config, family, tensors
        names = tensors.names()
        found = [prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in names]
        self.prefix = found[0] if found else PREFIXES[0]
        self.head = next((head for head in _HEADS if head in names), _HEADS[0])
        self.scale_offset = 0.0 if tensors.norm_scales_include_one else family.norm_scale_offset

    def weight(self, name: str, *shape: int) -> _Weight:
        return _Weight(self, (self.prefix + name,), (shape,))

    def scale(self, name: str, size: int) -> _Scale:
        return _Scale(self, (self.prefix + name,), ((size,),))

    def check(self, recipe: DecoderParams) -> None:
        """Raises WeightsError unless the checkpoint holds exactly what the recipe reads."""
        expected = dict(_expected(recipe))
        present = {
            n for n in self.tensors.names() if not n.startswith(self.family.ignored_prefixes or ("\0",))
        }
        missing = sorted(expected.keys() - present)
        extra = sorted(present - expected.keys())
        misshapen = [
            f"{name} is {list(self.tensors.shape(name))}, expected {list(shape)}"
            for name, shape in sorted(expected.items())
            if name in present and self.tensors.shape(name) != shape
        ]
        faults = [
            f"{title}: {_listed(names)}"
            for title, names in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
            if names
        ]
        if faults:
            raise WeightsError(
                f"{self.tensors.description}: tensors do not fit its config ({self.config.family}): "
                + "; ".join(faults)
            )


def _expected(recipe: DecoderParams) -> Iterator[tuple[str, tuple[int, ...]]]:
    for weight in jax.tree.leaves(recipe, is_leaf=lambda x: isinstance(x, _Weight)):
        yield from zip(weight.names, weight.shapes, strict=True)


def _listed(names: list[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _recipe(config: ModelConfig, reader: _Reader) -> DecoderParams:
    head = None
    if not config.tie_embeddings:
        head = _Weight(reader, (reader.head,), ((config.vocab_size, config.embed_dim),))
    return DecoderParams(
        embedding=reader.weight("embed_tokens.weight", config.vocab_size, config.embed_dim),
        layers=tuple(_block(config, reader, index) for index in range(len(config.layers))),
        final_norm=reader.scale("norm.weight", config.embed_dim),
        lm_head=head,
    )


def _block(config: ModelConfig, reader: _Reader, index: int) -> BlockParams:
    layer = f"layers.{index}."

    def scale(name: str) -> _Scale:
        return reader.scale(f"{layer}{name}.weight", config.embed_dim)

    # With norms on both sides of a part, the name that others give the second input norm means the first
    # output norm.
    post = config.post_norms
    return BlockParams(
        mixer_norm=scale("input_layernorm"),
        mixer=_attention(config, reader, f"{layer}self_attn."),
        mlp_norm=scale("pre_feedforward_layernorm" if post else "post_attention_layernorm"),
        mlp=_mlp(config, reader, f"{layer}mlp."),
        mixer_post_norm=scale("post_attention_layernorm") if post else None,
        mlp_post_norm=scale("post_feedforward_layernorm") if post else None,
    )


def _attention(config: ModelConfig, reader: _Reader, at: str) -> AttentionParams:
    kv_heads, dim = config.num_kv_heads, config.head_dim
    per_query = 2 if config.attention_gate else 1

    def join(parts: list[np.ndarray]) -> np.ndarray:
        query, key, value = parts
        # Stored [heads, (query, gate), H, D]: the queries of a key/value head come first, then their gates.
        grouped = query.reshape(kv_heads, config.num_groups, per_query, dim, -1).swapaxes(1, 2)
        grouped = grouped.reshape(kv_heads, -1, dim, grouped.shape[-1])
        one = (kv_heads, 1, dim, grouped.shape[-1])
        return np.concatenate([grouped, key.reshape(one), value.reshape(one)], axis=1)

    rows = (config.num_q_heads * per_query * dim, kv_heads * dim, kv_heads * dim)
    names = tuple(f"{reader.prefix}{at}{part}_proj.weight" for part in "qkv")
    return AttentionParams(
        qkv=_Weight(reader, names, tuple((size, config.embed_dim) for size in rows), join),
        out=reader.weight(f"{at}o_proj.weight", config.embed_dim, config.num_q_heads * dim),
        q_norm=reader.scale(f"{at}q_norm.weight", dim) if config.qk_norm else None,
        k_norm=reader.scale(f"{at}k_norm.weight", dim) if config.qk_norm else None,
    )


def _mlp(config: ModelConfig, reader: _Reader, at: str) -> MlpParams:
    names = tuple(f"{reader.prefix}{at}{part}_proj.weight" for part in ("gate", "up"))
    return MlpParams(
        gate_up=_Weight(reader, names, ((config.mlp_dim, config.embed_dim),) * 2, np.stack),
        down=reader.weight(f"{at}down_proj.weight", config.embed_dim, config.mlp_dim),
    )
