"""A Gated DeltaNet layer: a recurrent state and the last inputs of its convolution, whatever the length."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class GatedDeltaState:
    """What one layer remembers of all columns so far. It has no rows, so nothing of it can be cut off.

    Attributes:
      recurrent_state: float32 [B, nv, dk, dv] in a model of any dtype: it sums over the whole past.
      conv_state: [B, K - 1, C], the raw inputs of the last K - 1 columns, newest last; zeros before the first
        column. In the model's dtype.
    """

    recurrent_state: jax.Array
    conv_state: jax.Array

    def rollback_floor(self) -> None:
        """Returns None: an earlier length cannot be told from the state."""
        return None

    def checkpoint(self, length: jax.Array) -> GatedDeltaState:
        """Returns the whole state.

        Args:
          length: int32 [B], the state's own length: the mixer gives the states within a step.
        """
        return self

    @jax.jit  # one call a layer, where it is called outside jit; and buffers that are not the checkpoint's
    def restore(self, saved: GatedDeltaState, length: jax.Array, allowed: jax.Array) -> GatedDeltaState:
        """Returns the saved state in the batch rows where `allowed`."""

        def chosen(saved: jax.Array, current: jax.Array) -> jax.Array:
            return jnp.where(allowed.reshape(-1, *([1] * (current.ndim - 1))), saved, current)

        return jax.tree.map(chosen, saved, self)
