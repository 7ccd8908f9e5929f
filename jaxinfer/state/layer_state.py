"""What every layer's state can do, whatever it holds.

A layer state is an immutable pytree of arrays that start with the batch axis. A new kind of layer brings a
class with these methods and a line in `init_state`; rollback, checkpoints and the budget then follow.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import jax

from jaxinfer.spans import KeySpans
from jaxinfer.state.rows import Rows
from jaxinfer.state.step import Step


class LayerState(Protocol):
    """The state of one layer, as rollback and checkpoints see it."""

    def rollback_floor(self) -> jax.Array | None:
        """Returns the least length that each row can be truncated to, int32 [B]; None where the layer
        cannot be truncated at all.

        At or above its floor a layer needs no change to be truncated: what lies past the new length is
        never read, and is overwritten.
        """
        ...

    def checkpoint(self, length: jax.Array) -> Any:
        """Returns the pytree that `restore` needs to take each row back to `length`, None for nothing.

        Always traced, so the arrays need no copies of their own. Between `write` and `evict`, attention
        layers are asked for any length within the step; a recurrent layer answers for its own length only,
        and its mixer gives the checkpoints within a step.

        Args:
          length: int32 [B].
        """
        ...

    def restore(self, saved: Any, length: jax.Array, allowed: jax.Array) -> Self:
        """Returns the layer with the rows where `allowed` back at `length`, the others as they are.

        Args:
          saved: what `checkpoint` gave; length: int32 [B], the length it was asked for; allowed: bool [B].
        """
        ...


class AttentionState(LayerState, Protocol):
    """The key/value rows of one attention layer."""

    def write(self, step: Step, spans: KeySpans, key: jax.Array, value: jax.Array) -> tuple[Self, Rows]:
        """Returns the layer with the step's rows, and the rows and row-number spans to attend over.

        Args:
          spans: the layer's spans in positions, int32 [B, T]; key, value: [B, K, T, H].
        """
        ...

    def evict(self, step: Step, after: jax.Array) -> Self:
        """Returns the layer without the rows that no later step can read.

        Args:
          after: what attention made of the rows, any shape: rows are read before they are moved.
        """
        ...
