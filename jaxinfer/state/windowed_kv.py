"""A sliding layer that drops rows behind its window: row i holds position `base + i`.

The buffer is linear, not a ring, so that a span of positions stays one span of rows. A step appends its
rows behind the resident ones and attends; only then are rows evicted, by moving the rest to the front.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.spans import KeySpans
from jaxinfer.state.rows import Rows, shift_rows, write_rows
from jaxinfer.state.step import Step
from jaxinfer.state.window import KvWindow


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

        written = self.replace(key=append(self.key, key), value=append(self.value, value))
        base = self.base[:, None]
        # Nothing below the base is ever in a span that a query may read: max() only keeps empty spans and
        # spans that a caller widened inside the buffer.
        lo = jnp.maximum(spans.lo - base, 0)
        hi = jnp.where(spans.hi < spans.lo, -1, spans.hi - base)
        return written, Rows(written.key, written.value, lo, hi)

    def evict(self, step: Step) -> WindowedKV:
        """Returns the layer with no more rows than `window.rows_after(positions)`, in its own buffer size.

        Under vmap both branches of the condition run, so the rows are moved at every step.
        """
        held = step.end - self.base
        shift = held - jnp.minimum(self.window.rows_after(step.end), held)
        if self.key.shape[2] != self.num_rows:
            key, value = (shift_rows(rows, shift, self.num_rows) for rows in (self.key, self.value))
        else:
            key, value = lax.cond(
                jnp.any(shift > 0),
                lambda rows: tuple(shift_rows(x, shift, self.num_rows) for x in rows),
                lambda rows: rows,
                (self.key, self.value),
            )
        return self.replace(key=key, value=value, base=self.base + shift)

    def _fits(self, q_len: int, capacity: int | None) -> bool:
        # Between steps at most max_rows are resident; a buffer as large as the capacity holds any position.
        bounded = capacity is not None and self.num_rows >= capacity
        return bounded or self.window.max_rows + q_len <= self.num_rows
