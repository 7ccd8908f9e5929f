"""A sliding layer that drops rows behind its window: row i holds position `base + i`.

The buffer is linear, not a ring, so that a span of positions stays one span of rows. A step appends its
rows behind the resident ones and attends; only then are rows evicted, by moving the rest to the front.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.spans import KeySpans
from jaxinfer.state.rows import Rows, shift_rows, write_rows
from jaxinfer.state.step import Step
from jaxinfer.state.window import KvWindow


@flax.struct.dataclass
class WindowRows:
    """What a checkpoint keeps of a sliding layer: the rows that the next query can still read.

    Attributes:
      key: [B, K, min(window - 1, num_rows), H]; row i holds position max(0, length - window + 1) + i, rows
        at and past the checkpoint's length mean nothing.
      value: as `key`.
    """

    key: jax.Array
    value: jax.Array


@flax.struct.dataclass
class WindowedKV:
    """The resident rows of one sliding layer.

    Attributes:
      key: [B, K, num_rows, H]; between `write` and `evict` of a step too long for the buffer,
        [B, K, num_rows + T, H].
      value: as `key`.
      base: position of row 0, int32 [B].
      window: what to keep; static.
      num_rows: rows allocated, min(capacity, window + slack + max_append); static.
    """

    key: jax.Array
    value: jax.Array
    base: jax.Array
    window: KvWindow = flax.struct.field(pytree_node=False)
    num_rows: int = flax.struct.field(pytree_node=False)

    def write(self, step: Step, spans: KeySpans, key: jax.Array, value: jax.Array) -> tuple[WindowedKV, Rows]:
        """Returns the layer with the step's rows behind the resident ones, and the rows to attend over.

        Args:
          spans: the layer's spans in positions, int32 [B, T]; key, value: [B, K, T, H].
        """
        q_len = key.shape[2]
        extra = 0 if self._fits(q_len, step.capacity) else q_len
        row = step.start - self.base

        def append(buffer: jax.Array, new: jax.Array) -> jax.Array:
            room = jnp.pad(buffer, ((0, 0), (0, 0), (0, extra), (0, 0)))
            return write_rows(room, new, row, step.lengths)

        written = dataclasses.replace(self, key=append(self.key, key), value=append(self.value, value))
        base = self.base[:, None]
        # Nothing below the base is ever in a span that a query may read: max() only keeps empty spans and
        # spans that a caller widened inside the buffer.
        lo = jnp.maximum(spans.lo - base, 0)
        hi = jnp.where(spans.hi < spans.lo, -1, spans.hi - base)
        return written, Rows(written.key, written.value, lo, hi)

    def evict(self, step: Step, after: jax.Array) -> WindowedKV:
        """Returns the layer with no more rows than `window.rows_after(positions)`, in its own buffer size.

        A step that evicts nothing copies nothing. Under vmap both branches of the condition run, so there
        rows are moved at every step.

        Args:
          after: what attention made of the rows, any shape; see `_false_after`.
        """
        held = step.end - self.base
        shift = held - jnp.minimum(self.window.rows_after(step.end), held)
        if self.key.shape[2] != self.num_rows:
            key, value = (shift_rows(rows, shift, self.num_rows) for rows in (self.key, self.value))
        elif self.num_rows <= self.window.max_rows:
            return self  # cut to a capacity below the first eviction
        else:
            key, value = lax.cond(
                jnp.any(shift > 0) | _false_after(after),
                lambda rows: tuple(self._moved(buffer, shift) for buffer in rows),
                lambda rows: rows,
                (self.key, self.value),
            )
        return dataclasses.replace(self, key=key, value=value, base=self.base + shift)

    def rollback_floor(self) -> jax.Array:
        """Returns the least length before which min(length, window - 1) rows are resident, int32 [B].

        base + window - 1 once rows were evicted, 0 before.
        """
        return jnp.where(self.base > 0, self.base + self.window.window - 1, 0)

    def checkpoint(self, length: jax.Array) -> WindowRows:
        """Returns the last window - 1 rows before `length`.

        Args:
          length: int32 [B], between the rollback floor and the position after the last row.
        """
        first = self._first_row(length) - self.base
        count = min(self.window.window - 1, self.num_rows)
        return WindowRows(shift_rows(self.key, first, count), shift_rows(self.value, first, count))

    @jax.jit  # one call a layer, where it is called outside jit
    def restore(self, saved: WindowRows, length: jax.Array, allowed: jax.Array) -> WindowedKV:
        """Returns the layer holding the saved rows, and no others, in the batch rows where `allowed`."""

        def replaced(buffer: jax.Array, rows: jax.Array) -> jax.Array:
            front = buffer[:, :, : rows.shape[2]]
            rows = jnp.where(allowed[:, None, None, None], rows, front)
            return lax.dynamic_update_slice(buffer, rows, (0, 0, 0, 0))

        return dataclasses.replace(
            self,
            key=replaced(self.key, saved.key),
            value=replaced(self.value, saved.value),
            base=jnp.where(allowed, self._first_row(length), self.base),
        )

    def _first_row(self, length: jax.Array) -> jax.Array:
        """Returns the first position that a query at position `length` may read."""
        return jnp.maximum(length - (self.window.window - 1), 0)

    def _moved(self, buffer: jax.Array, shift: jax.Array) -> jax.Array:
        """Returns the buffer with row `shift[b]` and those behind it moved to the front."""
        kept = shift_rows(buffer, shift, self.window.max_rows)
        return lax.dynamic_update_slice(buffer, kept, (0, 0, 0, 0))

    def _fits(self, q_len: int, capacity: int | None) -> bool:
        # Between steps at most max_rows are resident; a buffer as large as the capacity holds any position.
        bounded = capacity is not None and self.num_rows >= capacity
        return bounded or self.window.max_rows + q_len <= self.num_rows


def _false_after(value: jax.Array) -> jax.Array:
    """Returns False, by a computation that reads `value` and that XLA does not fold.

    XLA moves rows in place only where it can tell that every reader of the buffer comes first, and it tells
    by data dependence. Without one, attention and eviction are unordered and both whole buffers are copied
    at every step, evicting or not. (`lax.optimization_barrier` would say the same, but XLA's CPU compiler
    of jax 0.10 drops barriers before it decides on copies.)
    """
    probe = value.reshape(-1)[0].astype(jnp.float32)
    return jnp.isnan(probe) & jnp.isinf(probe)
