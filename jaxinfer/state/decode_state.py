"""What a model remembers between steps, as a value: steps return a new one and leave the old one valid."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.state.full_kv import FullKV
from jaxinfer.state.gated_delta import GatedDeltaState
from jaxinfer.state.layer_state import LayerState
from jaxinfer.state.status import Status
from jaxinfer.state.window import KvWindowPolicy
from jaxinfer.state.windowed_kv import WindowedKV

_NO_EVICTION = KvWindowPolicy.off()


@flax.struct.dataclass
class DecodeState:
    """The state of B sequences that advance side by side, each with its own length.

    Attributes:
      layers: one state a layer.
      length: positions consumed, int32 [B]; the next token's position.
      status: sticky bits of `Status`, int32 [B]; 0 when well.
      image_columns: which positions hold image columns, bool [B, capacity], False from `length` on; None
        for models that read no image run in both directions. An image run is computed as a whole, so no
        step may continue one and no truncation may cut one.
      rope_delta: rope position of the next token less `length`, int32 [B]; None without three-axis rope.
      image_end: the length from which on `rope_delta` holds and no column is of an image, int32 [B]; None
        without three-axis rope.
      capacity: the most positions, None when nothing bounds them; static.
    """

    layers: tuple[LayerState, ...]
    length: jax.Array
    status: jax.Array
    image_columns: jax.Array | None
    rope_delta: jax.Array | None
    image_end: jax.Array | None
    capacity: int | None = flax.struct.field(pytree_node=False)

    @property
    def batch(self) -> int:
        """Number of rows B."""
        return self.length.shape[0]

    @property
    def ends_in_image(self) -> jax.Array | None:
        """Whether the last column was an image column, bool [B]; None where `image_columns` is."""
        if self.image_columns is None:
            return None
        return _flag_at(self.image_columns, self.length - 1)

    def cuts_image_run(self, length: jax.Array) -> jax.Array:
        """Returns whether the first `length` columns end inside an image run that goes on, bool [B].

        False wherever no layer reads image runs in both directions: such runs may be cut.

        Args:
          length: int32 [B], 0 to the state's length.
        """
        if self.image_columns is None:
            return jnp.zeros(self.batch, bool)
        return _flag_at(self.image_columns, length - 1) & _flag_at(self.image_columns, length)

    def at_length(self, length: jax.Array, *, refused: jax.Array) -> DecodeState:
        """Returns the state cut to `length` columns a row, rows where `refused` marked `BAD_ROLLBACK`.

        The caller answers for the layers: that they can go on from there.

        Args:
          length: int32 [B], at most the state's own; refused: bool [B].
        """
        columns = self.image_columns
        if columns is not None:
            columns &= jnp.arange(columns.shape[1]) < length[:, None]
        status = self.status | jnp.where(refused, int(Status.BAD_ROLLBACK), 0)
        return dataclasses.replace(self, length=length, status=status, image_columns=columns)


def _flag_at(image_columns: jax.Array, position: jax.Array) -> jax.Array:
    """Returns whether a position holds an image column, bool [B]; False outside the state."""
    index = jnp.clip(position, 0, image_columns.shape[1] - 1)
    flag = jnp.take_along_axis(image_columns, index[:, None], axis=1)[:, 0]
    return flag & (position == index)


def init_state(
    config: ModelConfig,
    *,
    batch: int = 1,
    capacity: int,
    max_append: int = 512,
    dtype: str | None = None,
    kv_window: KvWindowPolicy = _NO_EVICTION,
) -> DecodeState:
    """Returns an empty state.

    Args:
      batch: rows B.
      capacity: the most positions a row may consume. A model of Gated DeltaNet layers and causal sliding
        ones only, with eviction on, is not bounded by it unless it cuts a buffer.
      max_append: columns of the largest step that a windowed layer takes within its own buffer; larger
        steps work and copy the buffer once.
      dtype: of key/value rows, "float32" or "bfloat16"; None: `config.dtype`. Recurrent states are float32
        whatever it is.
      kv_window: whether sliding layers drop rows behind their window.

    Raises:
      ValueError: a size below 1, or an unknown dtype.
    """
    for name, size in (("batch", batch), ("capacity", capacity), ("max_append", max_append)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"init_state({name}=...) must be an int of at least 1; got {size!r}")
    kv_dtype = kv_row_dtype(config, dtype)
    layers = []
    bounded = config.is_bidirectional  # a flag a position is kept
    for index, layer in enumerate(config.layers):
        if layer.kind is LayerKind.GATED_DELTA:
            layers.append(_empty_gated_delta(config, batch))
            continue
        window = kv_window.layer_window(config, index)
        rows = capacity if window is None else min(capacity, window.max_rows + max_append)
        bounded |= rows == capacity
        shape = (batch, config.num_kv_heads, rows, config.head_dim)
        # Two arrays, never one zeros array twice: a donated state must not donate a buffer twice.
        key, value = jnp.zeros(shape, kv_dtype), jnp.zeros(shape, kv_dtype)
        if window is None:
            layers.append(FullKV(key, value))
        else:
            layers.append(WindowedKV(key, value, jnp.zeros(batch, jnp.int32), window, rows))
    return DecodeState(
        layers=tuple(layers),
        length=jnp.zeros(batch, jnp.int32),
        status=jnp.zeros(batch, jnp.int32),
        image_columns=jnp.zeros((batch, capacity), bool) if config.is_bidirectional else None,
        rope_delta=jnp.zeros(batch, jnp.int32) if config.uses_mrope else None,
        image_end=jnp.zeros(batch, jnp.int32) if config.uses_mrope else None,
        capacity=capacity if bounded else None,
    )


def _empty_gated_delta(config: ModelConfig, batch: int) -> GatedDeltaState:
    sizes = config.gated_delta
    assert sizes is not None  # held by ModelConfig
    recurrent = (batch, sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
    conv = (batch, sizes.conv_width - 1, sizes.conv_channels)
    return GatedDeltaState(jnp.zeros(recurrent, jnp.float32), jnp.zeros(conv, config.dtype))


def kv_row_dtype(config: ModelConfig, dtype: str | None) -> jnp.dtype:
    """Returns the dtype of key/value rows; ValueError unless float32 or bfloat16."""
    name = config.dtype if dtype is None else jnp.dtype(dtype).name
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"init_state(dtype=...) must be 'float32' or 'bfloat16'; got {dtype!r}")
    return jnp.dtype(name)
