"""The bytes of a state before it exists: the budget, from the same shapes that allocate.

Two questions, two sets of answers. What will be *allocated*: `allocated_bytes` and what derives from it, to
the byte, because `init_state` and `snapshot` are asked for their shapes. How much of it holds positions that
are *live*: `resident_bytes` and `peak_bytes`, key/value rows alone. All of them are logical bytes;
`padded_bytes` says what tiling makes of them on a TPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.state.checkpoint import snapshot
from jaxinfer.state.decode_state import DecodeState, init_state, kv_row_dtype
from jaxinfer.state.window import KvWindow, KvWindowPolicy

_TILE_ROWS, _TILE_LANES, _TILE_BYTES = 8, 128, 4


@dataclasses.dataclass(frozen=True)
class KindBytes:
    """A share of `KvResidency.allocated_bytes`.

    Attributes:
      kind: of the layers; None for what belongs to no layer (lengths, status).
      num_layers: how many there are of the kind.
      state_bytes: of their states.
      checkpoint_bytes: of their part of the checkpoint ring.
    """

    kind: LayerKind | None
    num_layers: int
    state_bytes: int
    checkpoint_bytes: int


@dataclasses.dataclass(frozen=True)
class KvResidency:
    """What a state of one model costs, as a function of capacity or of positions. See `from_config`."""

    config: ModelConfig
    policy: KvWindowPolicy
    dtype: str
    batch: int
    max_append: int
    checkpoints: int

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        policy: KvWindowPolicy,
        *,
        dtype: str | None,
        batch: int = 1,
        max_append: int = 512,
        checkpoints: int = 0,
    ) -> KvResidency:
        """Returns the budget of states that `init_state` makes with the same arguments.

        Args:
          dtype: of key/value rows; None: `config.dtype`.
          checkpoints: how many checkpoints are kept beside the state.

        Raises:
          ValueError: an unknown dtype, a size below 1, or a negative number of checkpoints.
        """
        if not isinstance(checkpoints, int) or isinstance(checkpoints, bool) or checkpoints < 0:
            raise ValueError(
                f"KvResidency.from_config(checkpoints=...) must be an int of at least 0; got {checkpoints!r}"
            )
        dtype_name = kv_row_dtype(config, dtype).name
        residency = cls(config, policy, dtype_name, batch, max_append, checkpoints)
        residency._shapes(1)  # init_state refuses what it refuses
        return residency

    def allocated_bytes(self, capacity: int) -> int:
        """Returns the bytes of every array of a state of this capacity and of its checkpoints."""
        return sum(part.state_bytes + part.checkpoint_bytes for part in self.by_layer_kind(capacity))

    def by_layer_kind(self, capacity: int) -> tuple[KindBytes, ...]:
        """Returns the shares of `allocated_bytes`: one a kind in order of first use, then the rest."""
        state, checkpoint = self._shapes(capacity)
        layers = tuple(zip(self.config.layers, state.layers, checkpoint.layers, strict=True))
        parts = []
        for kind in dict.fromkeys(layer.kind for layer in self.config.layers):
            mine = [pair for layer, *pair in layers if layer.kind is kind]
            state_bytes, checkpoint_bytes = (_num_bytes(part) for part in zip(*mine, strict=True))
            parts.append(KindBytes(kind, len(mine), state_bytes, self.checkpoints * checkpoint_bytes))
        state_bytes = _num_bytes(state) - sum(part.state_bytes for part in parts)
        checkpoint_bytes = self.checkpoints * _num_bytes(checkpoint)
        checkpoint_bytes -= sum(part.checkpoint_bytes for part in parts)
        return (*parts, KindBytes(None, 0, state_bytes, checkpoint_bytes))

    def padded_bytes(self, capacity: int) -> int:
        """Returns what `allocated_bytes` becomes on a TPU, where the last two axes are padded to tiles.

        128 lanes by up to 8 rows, for arrays in row-major layout; XLA may transpose an array inside a
        program. https://openxla.org/xla/tiled_layout
        """
        state, checkpoint = self._shapes(capacity)
        return _num_padded_bytes(state) + self.checkpoints * _num_padded_bytes(checkpoint)

    def max_capacity(self, budget_bytes: int) -> int:
        """Returns the largest capacity whose `allocated_bytes` fit, at most the model's trained length.

        Raises:
          ValueError: not even a capacity of 1 fits.
        """
        fixed = self.allocated_bytes(1)
        if budget_bytes < fixed:
            raise ValueError(
                f"KvResidency.max_capacity(budget_bytes={budget_bytes}) must be at least {fixed}, the bytes "
                "of a state with room for one position"
            )
        fits, too_large = 1, self.config.max_positions + 1
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if self.allocated_bytes(middle) <= budget_bytes:
                fits = middle
            else:
                too_large = middle
        return fits

    def resident_bytes(self, positions: int) -> int:
        """Returns the bytes of key/value rows that are live after `positions` tokens a row, one at a time.

        A full-attention layer holds them all, a sliding layer with eviction `rows_after(positions)`; each
        checkpoint the rows that it copies. Recurrent states hold no rows.
        """
        return self._row_bytes(positions, lambda window: window.rows_after(positions))

    def peak_bytes(self, positions: int) -> int:
        """Returns an upper bound of `resident_bytes` over the steps to `positions`, rows that a step of
        `max_append` tokens adds before it evicts included: min(positions, window + slack + max_append)."""
        return self._row_bytes(positions, lambda window: min(positions, window.max_rows + self.max_append))

    def _row_bytes(self, positions: int, live_rows: Callable[[KvWindow], int]) -> int:
        if not isinstance(positions, int) or positions < 0:
            raise ValueError(
                f"KvResidency: positions must be an int of at least 0; got {positions!r}; one number for "
                "all rows of the batch"
            )
        rows = 0
        for index, layer in enumerate(self.config.layers):
            if layer.kind is LayerKind.GATED_DELTA:
                continue
            window = self.policy.layer_window(self.config, index)
            if window is None:
                rows += positions
            else:
                rows += live_rows(window) + self.checkpoints * min(positions, window.window - 1)
        row_bytes = 2 * self.config.num_kv_heads * self.config.head_dim * jnp.dtype(self.dtype).itemsize
        return self.batch * rows * row_bytes

    def _shapes(self, capacity: int) -> tuple[DecodeState, Any]:
        """Returns a state and a checkpoint of it, with `jax.ShapeDtypeStruct` leaves."""
        state = jax.eval_shape(
            lambda: init_state(
                self.config,
                batch=self.batch,
                capacity=capacity,
                max_append=self.max_append,
                dtype=self.dtype,
                kv_window=self.policy,
            )
        )
        return state, jax.eval_shape(snapshot, state)


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _num_padded_bytes(tree: Any) -> int:
    return sum(_padded_size(leaf.shape, leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree))


def _padded_size(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the bytes of a row-major array on a TPU.

    Tiles are 128 lanes by 8 rows; short axes take the next power of two of rows (not below the 4 bytes that
    values narrower than that are packed into), and single axes a power of two from 128 to 1024 lanes.
    """
    if math.prod(shape) == 0:
        return 0
    if len(shape) < 2:
        size = math.prod(shape)
        return itemsize * _round_up(size, min(1024, max(_TILE_LANES, _power_of_two(size))))
    *outer, rows, lanes = shape
    tile_rows = min(_TILE_ROWS, max(_TILE_BYTES // itemsize, _power_of_two(rows)))
    return itemsize * math.prod(outer) * _round_up(rows, tile_rows) * _round_up(lanes, _TILE_LANES)


def _power_of_two(size: int) -> int:
    """Returns the least power of two that is not below `size`, at least 1."""
    return 1 << (size - 1).bit_length()


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
