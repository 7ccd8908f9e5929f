"""A layer that keeps every key/value row: row number and position are the same."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxinfer.spans import KeySpans
from jaxinfer.state.rows import Rows, write_rows
from jaxinfer.state.step import Step


@flax.struct.dataclass
class FullKV:
    """All rows of one attention layer.

    Attributes:
      key: [B, K, capacity, H].
      value: [B, K, capacity, H].
    """

    key: jax.Array
    value: jax.Array

    def write(self, step: Step, spans: KeySpans, key: jax.Array, value: jax.Array) -> tuple[FullKV, Rows]:
        """Returns the layer with the step's rows, and the rows its queries attend over.

        Args:
          spans: the layer's spans in positions, int32 [B, T]; key, value: [B, K, T, H].
        """
        written = FullKV(
            write_rows(self.key, key, step.start, step.lengths),
            write_rows(self.value, value, step.start, step.lengths),
        )
        return written, Rows(written.key, written.value, spans.lo, spans.hi)

    def evict(self, step: Step, after: jax.Array) -> FullKV:
        """Returns the layer itself: it keeps every row."""
        return self

    def rollback_floor(self) -> jax.Array:
        """Returns 0 a row, int32 [B]."""
        return jnp.zeros(self.key.shape[0], jnp.int32)

    def checkpoint(self, length: jax.Array) -> None:
        """Returns nothing: the rows before `length` stay where they are."""
        return None

    def restore(self, saved: None, length: jax.Array, allowed: jax.Array) -> FullKV:
        """Returns the layer itself: rows past the length are never read."""
        return self
