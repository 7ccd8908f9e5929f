"""Checkpoints: what a state cannot re-derive of an earlier length of itself.

A layer that keeps every row needs nothing: the rows before the length are still there. A sliding layer that
evicts needs the window - 1 rows that the next query can read, a recurrent layer its whole state.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.state.decode_state import DecodeState
from jaxinfer.state.host import known


@flax.struct.dataclass
class Checkpoint:
    """B rows of a state, each at its own length. A pytree that shares no buffer with the state.

    Attributes:
      length: positions consumed, int32 [B]; -1 where not valid.
      valid: whether the row can be restored, bool [B].
      layers: what each layer keeps, None for a layer that keeps every row.
      rope_delta, image_end: as in `DecodeState`.
    """

    length: jax.Array
    valid: jax.Array
    layers: tuple[Any, ...]
    rope_delta: jax.Array | None
    image_end: jax.Array | None

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, as if laid out without padding."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


@jax.jit  # its results are buffers of their own, even where a value passes through
def snapshot(state: DecodeState) -> Checkpoint:
    """Returns a checkpoint of every row as it is now.

    It holds nothing of layers that keep every row, so it restores the state it was taken from, or one
    appended from that state, and no other. It stays valid when the state is donated.
    """
    return Checkpoint(
        length=state.length,
        valid=jnp.ones(state.batch, bool),
        layers=tuple(layer.checkpoint(state.length) for layer in state.layers),
        rope_delta=state.rope_delta,
        image_end=state.image_end,
    )


def restore(state: DecodeState, checkpoint: Checkpoint) -> DecodeState:
    """Returns the state with every row back at its checkpoint; both arguments stay valid.

    From there the state decodes as one that never went further. A sliding layer that evicts holds the last
    window - 1 rows, so a truncation right after a restore has less room than before it. Layers that keep
    every row are shared with `state`, not copied: donate one of the two only when done with the other.

    Args:
      state: the state that the checkpoint was taken from, or one appended from it. That is the caller's to
        know (the tokens tell); the lengths are checked.
      checkpoint: of the same model, batch and window policy.

    Raises:
      ValueError: a checkpoint of another layout; and, where values are known on the host, a row that is not
        valid or longer than the state's. Inside jit such a row is left as it is, with `BAD_ROLLBACK` set.
    """
    _check_layout(state, checkpoint)
    # Layers stay outside jit, which copies what passes through: most of them are kept as they are.
    rest, allowed = _restore_rest(
        dataclasses.replace(state, layers=()), dataclasses.replace(checkpoint, layers=())
    )
    allowed_known = known(allowed)
    if allowed_known is not None and not allowed_known.all():
        row = int(np.flatnonzero(~allowed_known)[0])
        if not np.asarray(checkpoint.valid)[row]:
            raise ValueError(
                f"restore(checkpoint=...) holds nothing for row {row}: its `valid` is False (no length asked "
                "for, not within the step, or inside an image run)"
            )
        raise ValueError(
            f"restore(checkpoint=...) is at {np.asarray(checkpoint.length)[row]} for row {row}, the state "
            f"only at {np.asarray(state.length)[row]}; restore the state that it was taken from, or one "
            "appended from it"
        )
    layers = tuple(
        layer.restore(saved, rest.length, allowed)
        for layer, saved in zip(state.layers, checkpoint.layers, strict=True)
    )
    return dataclasses.replace(rest, layers=layers)


@jax.jit
def _restore_rest(state: DecodeState, checkpoint: Checkpoint) -> tuple[DecodeState, jax.Array]:
    """Returns the restored state but for its layers, and which rows may be restored, bool [B]."""
    allowed = checkpoint.valid & (checkpoint.length <= state.length)

    def chosen(saved: jax.Array | None, current: jax.Array | None) -> jax.Array | None:
        if saved is None or current is None:  # both or neither: the layouts agree
            return None
        return jnp.where(allowed, saved, current)

    restored = dataclasses.replace(
        state,
        rope_delta=chosen(checkpoint.rope_delta, state.rope_delta),
        image_end=chosen(checkpoint.image_end, state.image_end),
    )
    length = jnp.where(allowed, checkpoint.length, state.length)
    return restored.at_length(length, refused=~allowed), allowed


def _check_layout(state: DecodeState, checkpoint: Checkpoint) -> None:
    """Raises ValueError unless the checkpoint has the shapes of one of this state."""

    def layout(tree: Any) -> tuple[Any, list[tuple[tuple[int, ...], np.dtype]]]:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

    wanted, got = layout(jax.eval_shape(snapshot, state)), layout(checkpoint)
    if wanted != got:
        raise ValueError(
            "restore(checkpoint=...) is not of a state like this one: layers, batch, dtype and window policy "
            f"must agree; wanted {wanted[1]}, got {got[1]}"
        )
