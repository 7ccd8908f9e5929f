"""The gated delta rule: validate the call, then dispatch it to one implementation."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels import native
from pallas_kernels.compat import target_platform
from pallas_kernels.gated_delta.native import gated_delta_step_native
from pallas_kernels.gated_delta.reference import checkpoints_before_scan, gated_delta_reference
from pallas_kernels.gated_delta.xla import gated_delta_chunk_xla, gated_delta_step_xla

Implementation = Literal["reference", "xla", "native", "pallas_tpu", "pallas_gpu"]

_FLOATS = (jnp.dtype("float32"), jnp.dtype("bfloat16"))
_INT32 = jnp.dtype("int32")


def gated_delta_chunk(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array,
    lengths: jax.Array | None = None,
    checkpoint_columns: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (output, final_state, checkpoint_states) of the gated delta rule over T columns.

    For value head j, with the keys and queries of key head j // (nv // nk) brought to unit length by this op
    (x / sqrt(sum(x^2) + 1e-6)) and the queries scaled by dk^-0.5, column t does

        S <- e^(log_decay_t) S;  S <- S + k_t (beta_t (v_t - S^T k_t))^T;  output_t = S^T q_t

    Padding columns change neither the state nor another column's output, whatever they hold (NaN included);
    their own output is zeros. Splitting the columns over several calls gives the same output and state to
    rounding. Differentiable, and maps under `vmap`; mapped, checkpoints are computed in every chunk.

    Args:
      query, key: [B, T, nk, dk], as they leave the convolution: float32 or bfloat16, not normalised.
      value: [B, T, nv, dv], float32 or bfloat16.
      log_decay: float32 [B, T, nv], at most 0; -inf forgets everything.
      beta: [B, T, nv], in [0, 1].
      initial_state: float32 [B, nv, dk, dv].
      lengths: int32 [B], real columns of each row; padding stands to their right. None: all are real.
      checkpoint_columns: int32 [B, k]: return the state after that many columns; 0 is the initial state, -1
        none. A row's padding changes nothing, so a column past its length gives its final state.
      implementation: None takes the best that the device and shapes allow.

    Returns:
      output [B, T, nv, dv] in value's dtype; final_state float32 [B, nv, dk, dv]; checkpoint_states float32
      [B, k, nv, dk, dv], zeros where the column is -1 and NaN where there is no such column, or None without
      `checkpoint_columns`.

    Raises:
      ValueError: a shape or dtype that does not fit; a checkpoint column outside [-1, T] where its value is
        known, which under a trace gives NaN.
      NotImplementedError: the named implementation cannot.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), equation 10.
    """
    name = "gated_delta_chunk"
    arrays = (query, key, value, log_decay, beta)
    _check_arrays(name, arrays, initial_state, lengths)
    _check_columns(checkpoint_columns, value.shape)
    form = _form(name, implementation, key, value)
    options = {"initial_state": initial_state, "lengths": lengths}
    if form == "reference":
        return gated_delta_reference(*arrays, **options, checkpoint_columns=checkpoint_columns)
    if value.shape[1] > 1:
        run = _tpu().gated_delta_chunk_tpu if form == "pallas_tpu" else gated_delta_chunk_xla
        return run(*arrays, **options, checkpoint_columns=checkpoint_columns)
    output, state = _step(form)(*arrays, **options)
    saved = checkpoints_before_scan(initial_state, checkpoint_columns, q_len=1)
    if saved is not None:
        saved = jnp.where((checkpoint_columns == 1)[..., None, None, None], state[:, None], saved)
    return output, state, saved


def gated_delta_step(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array,
    lengths: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (output, state) after one column: `gated_delta_chunk` for decoding, T = 1.

    The cost is the state's bytes. Donate `initial_state` under `jit` to update it in place; not donated, it
    stays as it was.

    Args:
      query, key: [B, 1, nk, dk]; value: [B, 1, nv, dv]; log_decay, beta: [B, 1, nv]; initial_state: float32
        [B, nv, dk, dv]; as for `gated_delta_chunk`.
      lengths: int32 [B], 1 or 0; 0 leaves the row's state as it is and its output zeros. None: all are 1.
      implementation: None takes the best that the device and shapes allow.

    Returns:
      output [B, 1, nv, dv] in value's dtype; state float32 [B, nv, dk, dv].

    Raises:
      ValueError: a shape or dtype that does not fit.
      NotImplementedError: the named implementation cannot.
    """
    name = "gated_delta_step"
    arrays = (query, key, value, log_decay, beta)
    _check_arrays(name, arrays, initial_state, lengths)
    if value.shape[1] != 1:
        raise ValueError(
            f"{name}(value=...) must be [B, 1, nv, dv]; got {value.shape}; use gated_delta_chunk for more"
        )
    options = {"initial_state": initial_state, "lengths": lengths}
    form = _form(name, implementation, key, value)
    if form == "reference":
        return gated_delta_reference(*arrays, **options, checkpoint_columns=None)[:2]
    return _step(form)(*arrays, **options)


def available_implementations() -> dict[Implementation, str | None]:
    """Returns, for every implementation, None if it runs here or why it does not.

    "Here" is the platform being compiled for; a call's shapes may still rule an implementation out.
    """
    return {name: _device_refusal(name) for name in get_args(Implementation)}


def _tpu() -> ModuleType:
    from pallas_kernels.gated_delta import tpu  # Pallas takes most of a second to import

    return tpu


def _step(form: Implementation) -> Callable:
    if form == "native":
        return gated_delta_step_native
    return _tpu().gated_delta_step_tpu if form == "pallas_tpu" else gated_delta_step_xla


def _device_refusal(implementation: Implementation) -> str | None:
    if implementation == "pallas_gpu":
        return "there is no such kernel yet"
    if implementation == "pallas_tpu":
        platform = target_platform()
        return None if platform == "tpu" else f"it runs on TPU; this is {platform}"
    return native.unavailable() if implementation == "native" else None


def _refusal(implementation: Implementation, key: jax.Array, value: jax.Array) -> str | None:
    """Returns why the implementation cannot take this call, None where it can."""
    reason = _device_refusal(implementation)
    if reason is None and implementation == "pallas_tpu":
        return _tpu().unsupported(key, value)
    if reason is None and implementation == "native" and value.shape[1] > 1:
        return "it takes one column at a time"
    return reason


def _form(
    name: str, implementation: Implementation | None, key: jax.Array, value: jax.Array
) -> Implementation:
    if implementation is None:
        kernels: tuple[Implementation, ...] = ("pallas_tpu", "native")
        for kernel in kernels:
            if _refusal(kernel, key, value) is None:
                return kernel
        return "xla"
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"{name}(implementation=...) must be one of {get_args(Implementation)} or None; "
            f"got {implementation!r}"
        )
    reason = _refusal(implementation, key, value)
    if reason is not None:
        raise NotImplementedError(
            f"{name}(implementation={implementation!r}) cannot take this call: {reason}; pass 'xla' or None"
        )
    return implementation


def _check_arrays(
    name: str, arrays: tuple[jax.Array, ...], initial_state: jax.Array, lengths: jax.Array | None
) -> None:
    query, key, value, log_decay, beta = arrays
    if key.ndim != 4 or value.ndim != 4:
        raise ValueError(
            f"{name}(key=..., value=...) must be [B, T, nk, dk] and [B, T, nv, dv]; "
            f"got {key.shape} and {value.shape}"
        )
    batch, q_len, num_key_heads, key_dim = key.shape
    num_value_heads, value_dim = value.shape[2:]
    if num_key_heads == 0 or num_value_heads % num_key_heads:
        raise ValueError(
            f"{name}(value=...) must have a multiple of key's {num_key_heads} heads; got {num_value_heads}"
        )
    if q_len == 0:
        raise ValueError(f"{name}(value=...) must have at least one column; got {value.shape}")
    gates = (batch, q_len, num_value_heads)
    _check(name, "query", query, "[B, T, nk, dk]", key.shape, _FLOATS)
    _check(name, "key", key, "[B, T, nk, dk]", key.shape, _FLOATS)
    _check(name, "value", value, "[B, T, nv, dv]", (*gates, value_dim), _FLOATS)
    _check(name, "log_decay", log_decay, "[B, T, nv]", gates, _FLOATS[:1])
    _check(name, "beta", beta, "[B, T, nv]", gates, _FLOATS)
    state = (batch, num_value_heads, key_dim, value_dim)
    _check(name, "initial_state", initial_state, "[B, nv, dk, dv]", state, _FLOATS[:1])
    if lengths is not None:
        _check(name, "lengths", lengths, "[B]", (batch,), (_INT32,))


def _check(
    name: str, argument: str, x: jax.Array, axes: str, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...]
) -> None:
    if x.shape != shape or x.dtype not in dtypes:
        expected = " or ".join(dtype.name for dtype in dtypes)
        raise ValueError(
            f"{name}({argument}=...) must be {expected} {axes}, here {shape}; got {x.dtype.name} {x.shape}"
        )


def _check_columns(columns: jax.Array | None, shape: tuple[int, ...]) -> None:
    if columns is None:
        return
    name = "gated_delta_chunk"
    if columns.ndim != 2:
        raise ValueError(f"{name}(checkpoint_columns=...) must be int32 [B, k]; got {columns.shape}")
    _check(name, "checkpoint_columns", columns, "[B, k]", (shape[0], columns.shape[1]), (_INT32,))
    if isinstance(columns, Tracer):
        return
    known = np.asarray(columns)
    if np.any((known < -1) | (known > shape[1])):
        raise ValueError(
            f"{name}(checkpoint_columns=...) must lie in [-1, {shape[1]}], -1 for none; got {known.tolist()}"
        )
