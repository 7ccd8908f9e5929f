"""What a step may take beside tokens, what it may give beside logits, and the checks the host can make."""

from __future__ import annotations

from typing import Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.state import Checkpoint, DecodeState, known

LogitsMode = Literal["last", "all", "none", "columns"]
GivenLogits = Literal["last", "all", "columns"]  # the modes that do give logits


@flax.struct.dataclass
class StepInputs:
    """Optional inputs of one forward; absent ones cost nothing. B rows, T columns.

    Attributes:
      lengths: real tokens a row, int32 [B]; the columns to their right are padding and change no state.
        None: all T.
      is_image: image columns, bool [B, T]; None: all text.
      embeddings: [B, T, D], replace the token embeddings where `embedding_mask`, after their scaling.
      embedding_mask: bool [B, T].
      positions: rope positions, int32 [B, T], or [3, B, T] for three-axis rope; spans come from row order
        regardless. None: consecutive from the state's length (plus its rope delta).
      deepstack: [j, B, T, D], added to the residual after each of the first j layers.
      adapter_ids: not supported yet, refused.
      checkpoint_at: absolute lengths to take checkpoints at, int32 [B, k]; -1: none. With
        `forward_with_aux` only.
      logit_columns: columns to give logits for, int32 [B, k], with `logits="columns"`.
    """

    lengths: jax.Array | None = None
    is_image: jax.Array | None = None
    embeddings: jax.Array | None = None
    embedding_mask: jax.Array | None = None
    positions: jax.Array | None = None
    deepstack: jax.Array | None = None
    adapter_ids: jax.Array | None = None
    checkpoint_at: jax.Array | None = None
    logit_columns: jax.Array | None = None


@flax.struct.dataclass
class Aux:
    """What a forward gives beside logits and state.

    Attributes:
      checkpoints: one for each column of `StepInputs.checkpoint_at`; a row's `valid` is False where its
        length is -1, not within the step, or inside an image run that a layer reads in both directions.
    """

    checkpoints: tuple[Checkpoint, ...] = ()


def check_call(
    tokens: jax.Array | np.ndarray,
    state: DecodeState | None,
    inputs: StepInputs,
    logits: str,
    config: ModelConfig,
) -> None:
    """Raises ValueError for what shapes, dtypes and host-known values show to be wrong with a forward."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"forward(tokens=...) must be int32 [B, T]; got {tokens.dtype} {tokens.shape}; "
            "a single sequence needs a batch axis: tokens[None]"
        )
    batch, q_len = tokens.shape
    if batch < 1 or q_len < 1:
        raise ValueError(f"forward(tokens=...) must hold at least one row and column; got {tokens.shape}")
    if logits not in get_args(LogitsMode):
        raise ValueError(f"forward(logits=...) must be one of {get_args(LogitsMode)}; got {logits!r}")
    if (logits == "columns") != (inputs.logit_columns is not None):
        raise ValueError(
            f"forward(logits={logits!r}) does not fit inputs.logit_columns="
            f"{'None' if inputs.logit_columns is None else '...'}: the two go together"
        )
    if state is not None and state.batch != batch:
        raise ValueError(
            f"forward(tokens=...) has {batch} rows, state has {state.batch}; init_state(batch={batch})"
        )
    if inputs.checkpoint_at is not None and state is None:
        raise ValueError("StepInputs(checkpoint_at=...) needs a state; got state=None")
    if inputs.adapter_ids is not None:
        raise ValueError("StepInputs(adapter_ids=...) is not supported yet; pass None")
    _check_shapes(inputs, batch, q_len, config)
    _check_values(tokens, state, inputs, config)


def _check_shapes(inputs: StepInputs, batch: int, q_len: int, config: ModelConfig) -> None:
    expected: dict[str, tuple[tuple[int | str, ...], ...]] = {
        "lengths": ((batch,),),
        "is_image": ((batch, q_len),),
        "embeddings": ((batch, q_len, config.embed_dim),),
        "embedding_mask": ((batch, q_len),),
        "positions": ((batch, q_len), (3, batch, q_len)) if config.uses_mrope else ((batch, q_len),),
        "deepstack": (("j", batch, q_len, config.embed_dim),),
        "checkpoint_at": ((batch, "k"),),
        "logit_columns": ((batch, "k"),),
    }
    kinds = {
        "is_image": (jnp.bool_, "bool"),
        "embedding_mask": (jnp.bool_, "bool"),
        "embeddings": (jnp.floating, "float"),
        "deepstack": (jnp.floating, "float"),
    }
    for name, shapes in expected.items():
        value = getattr(inputs, name)
        if value is None:
            continue
        kind, kind_name = kinds.get(name, (jnp.integer, "int32"))
        fits = any(_shape_fits(value.shape, shape) for shape in shapes)
        if not fits or not jnp.issubdtype(value.dtype, kind):
            wanted = " or ".join(str(list(shape)).replace("'", "") for shape in shapes)
            raise ValueError(
                f"StepInputs({name}=...) must be {kind_name} {wanted}; got {value.dtype} {value.shape}"
            )
    if (inputs.embeddings is None) != (inputs.embedding_mask is None):
        raise ValueError("StepInputs(embeddings=..., embedding_mask=...) go together; got only one")
    if inputs.deepstack is not None and inputs.deepstack.shape[0] > len(config.layers):
        raise ValueError(
            f"StepInputs(deepstack=...) has {inputs.deepstack.shape[0]} entries for "
            f"{len(config.layers)} layers"
        )


def _shape_fits(shape: tuple[int, ...], wanted: tuple[int | str, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        isinstance(w, str) or s == w for s, w in zip(shape, wanted, strict=True)
    )


def _check_values(
    tokens: jax.Array | np.ndarray, state: DecodeState | None, inputs: StepInputs, config: ModelConfig
) -> None:
    batch, q_len = tokens.shape
    lengths = np.full(batch, q_len) if inputs.lengths is None else known(inputs.lengths)
    if lengths is None:
        return
    if ((lengths < 0) | (lengths > q_len)).any():
        raise ValueError(f"StepInputs(lengths=...) must be in 0..{q_len}; got {lengths.tolist()}")
    at = known(inputs.checkpoint_at)
    if at is not None and (at < -1).any():
        raise ValueError(f"StepInputs(checkpoint_at=...) must be lengths, or -1 for none; got {at.min()}")
    columns = known(inputs.logit_columns)
    if columns is not None and ((columns < 0) | (columns >= np.maximum(lengths, 1)[:, None])).any():
        raise ValueError(
            f"StepInputs(logit_columns=...) must be real columns of their row, 0..lengths-1; got "
            f"{columns.tolist()} for lengths {lengths.tolist()}"
        )
    real = np.arange(q_len) < lengths[:, None]
    _check_tokens(known(tokens), real, inputs, config)
    if state is None:
        return
    start = known(state.length)
    if start is not None and state.capacity is not None:
        over = np.flatnonzero(start + lengths > state.capacity)
        if over.size:
            row = int(over[0])
            raise ValueError(
                f"forward(tokens=...) does not fit the state: row {row} holds {start[row]} of "
                f"{state.capacity} positions and gets {lengths[row]} more; init_state(capacity=...) larger"
            )
    flags = known(inputs.is_image)
    if flags is None or not (continues := flags[:, 0] & real[:, 0]).any():
        return
    began = known(state.ends_in_image)
    if began is not None and (cut := began & continues).any():
        row = int(np.flatnonzero(cut)[0])
        raise ValueError(
            f"forward(inputs.is_image=...) continues an image run that an earlier step began (row {row}); "
            "a run must lie within one step: plan_prefill_chunks gives such steps"
        )


def _check_tokens(
    tokens: np.ndarray | None, real: np.ndarray, inputs: StepInputs, config: ModelConfig
) -> None:
    replaced = None if inputs.embedding_mask is None else known(inputs.embedding_mask)
    if tokens is None or (replaced is None and inputs.embedding_mask is not None):
        return
    bad = real & ((tokens < 0) | (tokens >= config.vocab_size))
    if replaced is not None:
        bad &= ~replaced
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"forward(tokens=...) must be in 0..{config.vocab_size - 1}; got {tokens[row, column]} at row "
            f"{row}, column {column}"
        )
