"""Going back to an earlier length of the same state: total, or loud."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.state.decode_state import DecodeState
from jaxinfer.state.host import known


@jax.jit
def rollback_floor(state: DecodeState) -> jax.Array | None:
    """Returns the least length that each row can be truncated to, int32 [B].

    0 where every layer keeps all rows. Once a sliding layer has evicted, the last window - 1 rows before
    the target must be resident: its base + window - 1. With three-axis rope not below the end of the last
    image, whose positions a shorter state would have to know. None with recurrent layers: a state that
    cannot be truncated.
    """
    floor = jnp.zeros(state.batch, jnp.int32) if state.image_end is None else state.image_end
    for layer in state.layers:
        layer_floor = layer.rollback_floor()
        if layer_floor is None:
            return None
        floor = jnp.maximum(floor, layer_floor)
    return floor


def truncate(state: DecodeState, length: int | jax.Array | np.ndarray) -> DecodeState:
    """Returns the state as it was after its first `length` columns; `state` stays valid.

    Key/value rows are shared with `state`, not copied: donate one of the two only when done with the other.

    Args:
      length: columns to keep, an int for every row or int32 [B]; a row's own length leaves it as it is.

    Raises:
      ValueError: `length` is neither; the state has recurrent layers (restore a checkpoint instead); and,
        where values are known on the host, a row whose target is below its `rollback_floor`, past its
        length, or inside an image run that a layer reads in both directions. Inside jit such a row keeps
        its length, with `BAD_ROLLBACK` set.
    """
    floor = rollback_floor(state)
    if floor is None:
        raise ValueError(
            "truncate(state=...) has recurrent layers, which cannot go back; take checkpoints (snapshot, "
            "StepInputs(checkpoint_at=...)) and restore one"
        )
    target = _as_target(length, state.batch)
    # Layers need no change, and stay outside jit, which copies what passes through.
    rest, refused = _truncate_rest(dataclasses.replace(state, layers=()), target, floor)
    bad = known(refused)
    if bad is not None and bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(_refusal(row, *(int(np.asarray(x)[row]) for x in (target, floor, state.length))))
    return dataclasses.replace(rest, layers=state.layers)


@jax.jit
def _truncate_rest(state: DecodeState, target: jax.Array, floor: jax.Array) -> tuple[DecodeState, jax.Array]:
    """Returns the truncated state but for its layers, and which rows are refused, bool [B]."""
    refused = (target < floor) | (target > state.length) | state.cuts_image_run(target)
    return state.at_length(jnp.where(refused, state.length, target), refused=refused), refused


def _as_target(length: int | jax.Array | np.ndarray, batch: int) -> jax.Array | np.ndarray:
    """Returns `length` as int32 [B]."""
    got: object = length
    if isinstance(length, int | np.integer) and not isinstance(length, bool):
        if abs(length) < 2**31:
            return np.full(batch, length, np.int32)
    elif isinstance(length, jax.Array | np.ndarray):
        if jnp.issubdtype(length.dtype, jnp.integer) and length.shape in ((), (batch,)):
            return jnp.broadcast_to(jnp.asarray(length, jnp.int32), (batch,))
        got = f"{length.dtype} {length.shape}"
    raise ValueError(f"truncate(length=...) must be an int or int32 [{batch}]; got {got}")


def _refusal(row: int, target: int, floor: int, length: int) -> str:
    start = f"truncate(length={target}): row {row} holds {length} positions and "
    if target > length:
        return start + "cannot get longer; append tokens instead"
    if target < floor:
        return start + f"can go back to {floor} at least; restore a checkpoint, or refill"
    return start + "has an image run across that length; truncate to the run's start or end"
