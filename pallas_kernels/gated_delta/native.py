"""One step of the gated delta rule in C++ (`native.cc`) for CPUs; see `pallas_kernels.native`.

The XLA form reads the state twice and is bound by its products; this one reads and writes it once. The
backward pass is the XLA form's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.gated_delta.xla import advance, step_inputs


def gated_delta_step_native(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array,
    lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (output, the state after the one column); see `gated_delta_step`.

    Under `vmap` the calls run one after another.
    """
    column = step_inputs(query, key, value, log_decay, beta, lengths)
    out, state = _advance(column, initial_state)
    return out[:, None].astype(value.dtype), state


@jax.custom_vjp
def _advance(column, state):
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (column[2], state)]
    call = jax.ffi.ffi_call(
        native.target("gated_delta_step"),
        shapes,
        input_output_aliases={5: 1},
        vmap_method="sequential",
    )
    out, after = call(*column, state)
    return out, after


def _advance_fwd(column, state):
    return jax.vjp(advance, column, state)


def _advance_bwd(vjp, given):
    return vjp(given)


_advance.defvjp(_advance_fwd, _advance_bwd)
