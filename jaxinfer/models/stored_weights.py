"""How a checkpoint's tensors become params: each leaf names the tensors that make it and how they join.

A recipe is a pytree of params whose leaves are `StoredWeight`s; `check` holds it against the checkpoint's
names and shapes before anything is read, `read` gives the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import jax
import ml_dtypes
import numpy as np

from jaxinfer.ops import QuantizedWeight, Weight, is_quantized, quantize_into

_Params = TypeVar("_Params")  # a pytree; as `recipe` its leaves are `StoredWeight`s

# Buffers that old Llama checkpoints carry along; the config says the same.
_DERIVED_SUFFIX = ".self_attn.rotary_emb.inv_freq"

# Reading is numpy work that frees the interpreter lock; two threads also overlap it with the device copy.
_READERS = 2

_ALIGNMENT = 64  # bytes, XLA's on a CPU


class Tensors(Protocol):
    """The tensors of a checkpoint by Hugging Face name; see `jaxinfer.loading.TensorSource`."""

    @property
    def description(self) -> str: ...
    @property
    def norm_scales_include_one(self) -> bool: ...
    def names(self) -> frozenset[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, dtype: np.dtype | type, out: np.ndarray | None = None) -> np.ndarray: ...


class WeightsError(ValueError):
    """Tensors of a checkpoint that are missing, extra or misshapen; the message names them."""


# Writes tensor number `index` of a weight into the weight: put(out, index, tensor).
Put = Callable[[np.ndarray, int, np.ndarray], None]


class StoredWeight:
    """One leaf: the tensors that make it, their shapes, and where each one goes.

    `put` None: a single tensor with the leaf's elements in order. `offset` is added to what is read.
    """

    def __init__(
        self,
        tensors: Tensors,
        names: Iterable[str],
        shapes: Iterable[tuple[int, ...]],
        *,
        put: Put | None = None,
        offset: float = 0.0,
    ):
        self.tensors, self.names, self.shapes = tensors, tuple(names), tuple(shapes)
        self.put, self.offset = put, offset

    def read(self, leaf: jax.ShapeDtypeStruct | QuantizedWeight) -> Weight:
        """Returns the weight with the leaf's shape and dtype; a quantised one is read in bfloat16 first."""
        if isinstance(leaf, QuantizedWeight):
            weight = self._read(leaf.shape, np.dtype(ml_dtypes.bfloat16))
            values = _aligned_empty(leaf.shape, np.dtype(np.int8))
            scale = _aligned_empty(leaf.shape[:-1], np.dtype(np.float32))
            quantize_into(values, scale, weight)
            return QuantizedWeight(jax.device_put(values), jax.device_put(scale))
        # On a CPU without a copy: nobody else holds the buffer.
        return jax.device_put(self._read(leaf.shape, np.dtype(leaf.dtype)))

    def _read(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        out = _aligned_empty(shape, dtype)
        if self.put is None:
            self.tensors.read(self.names[0], dtype, out)
        else:
            for index, name in enumerate(self.names):
                self.put(out, index, self.tensors.read(name, dtype))
        if self.offset:
            out += dtype.type(self.offset)
        return out


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an empty array at an address that a CPU device takes as it is, without copying it."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def stack(out: np.ndarray, index: int, tensor: np.ndarray) -> None:
    """Puts tensors one after another along the leading axes: number i fills the i-th [out..., in]."""
    out.reshape(-1, *tensor.shape)[index] = tensor


def check(
    recipe: Any,
    tensors: Tensors,
    *,
    model: str,
    ignored_prefixes: tuple[str, ...] = (),
    only_prefixes: tuple[str, ...] | None = None,
) -> None:
    """Raises WeightsError unless the checkpoint holds exactly what the recipe reads.

    Args:
      model: what the recipe is for, in the message.
      ignored_prefixes: names that do not count.
      only_prefixes: the names that count; None: all.
    """
    expected = dict(_expected(recipe))
    names = {name for name in tensors.names() if not name.endswith(_DERIVED_SUFFIX)}
    names = {name for name in names if not name.startswith(ignored_prefixes or ("\0",))}
    present = names if only_prefixes is None else {name for name in names if name.startswith(only_prefixes)}
    missing = sorted(expected.keys() - present)
    extra = sorted(present - expected.keys())
    misshapen = [
        f"{name} is {list(tensors.shape(name))}, expected {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in present and tensors.shape(name) != shape
    ]
    faults = [
        f"{title}: {_listed(found)}"
        for title, found in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        if found
    ]
    if faults:
        raise WeightsError(
            f"{tensors.description}: tensors do not fit its config ({model}): " + "; ".join(faults)
        )


def read(recipe: _Params, shapes: _Params) -> _Params:
    """Returns the arrays of a recipe; `shapes` is the same pytree of `jax.ShapeDtypeStruct`s, or
    of quantised weights of such."""
    leaves, structure = jax.tree.flatten(shapes, is_leaf=is_quantized)
    weights = structure.flatten_up_to(recipe)
    with ThreadPoolExecutor(_READERS) as pool:
        arrays = list(pool.map(lambda pair: pair[0].read(pair[1]), zip(weights, leaves, strict=True)))
    return jax.tree.unflatten(structure, arrays)


def _expected(recipe: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for weight in jax.tree.leaves(recipe):
        yield from zip(weight.names, weight.shapes, strict=True)


def _listed(names: list[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
