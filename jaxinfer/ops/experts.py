"""Routed gated MLPs: each token goes through its own few experts, and the cost follows how few.

The (token, expert) pairs are sorted by expert, so that the rows of one expert are one segment. On a CPU a
loop runs over the experts that have rows, takes each one's weights out of the bank once, and multiplies the
segment block by block; elsewhere `lax.ragged_dot` does the same in one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.ops.linear import linear
from jaxinfer.ops.quantized_weight import QuantizedWeight, Weight
from pallas_kernels.compat import target_platform

ExpertsImplementation = Literal["blocked", "ragged"]

# Rows multiplied at a time: large blocks while a segment has that many rows left, small ones for its rest.
_LARGE_BLOCK = 128
_SMALL_BLOCK = 32
# With so few rows a segment is one block.
_FEW_ROWS = 8


def routed_mlp(
    x: jax.Array,
    gate_up: Weight,
    down: Weight,
    expert_ids: jax.Array,
    weights: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array],
    implementation: ExpertsImplementation | None = None,
) -> jax.Array:
    """Returns `sum_j weights[n, j] * down_e(act(gate_e(x_n)) * up_e(x_n))`, e = expert_ids[n, j]: [N, D].

    float32. Rows do not influence one another, whatever they hold. Differentiable in reverse mode once, in
    everything but the ids; under `vmap` over rows alone the batch is folded into N.

    Args:
      x: [N, D], cast to the weights' dtype.
      gate_up: [E, 2, F, D]: gate, then up; may be quantised, and has no gradient then.
      down: [E, D, F], as `gate_up`.
      expert_ids: int32 [N, k], distinct in a row; one outside 0..E-1 makes its row NaN.
      weights: float32 [N, k].
      activation: elementwise.
      implementation: "blocked" (loops over experts), "ragged" (`lax.ragged_dot`, whose cost on a CPU grows
        with E); None takes "blocked" on a CPU, else "ragged".

    Raises:
      ValueError: shapes that do not fit, or an unknown implementation.
    """
    _check_shapes(x, gate_up, down, expert_ids, weights)
    if implementation is None:
        implementation = "blocked" if target_platform() == "cpu" else "ragged"
    if implementation not in get_args(ExpertsImplementation):
        raise ValueError(
            f"routed_mlp(implementation=...) must be one of {get_args(ExpertsImplementation)} or None; "
            f"got {implementation!r}"
        )
    known = (expert_ids >= 0) & (expert_ids < gate_up.shape[0])
    expert_ids, weights = jnp.where(known, expert_ids, 0), jnp.where(known, weights, jnp.nan)
    form = _Form(activation, implementation)
    return _routed(form, x.astype(gate_up.dtype), gate_up, down, expert_ids, weights)


def _check_shapes(
    x: jax.Array, gate_up: Weight, down: Weight, expert_ids: jax.Array, weights: jax.Array
) -> None:
    num_rows, embed_dim = x.shape
    num_experts, _, mlp_dim, _ = gate_up.shape
    expected = {
        "gate_up": (gate_up, (num_experts, 2, mlp_dim, embed_dim)),
        "down": (down, (num_experts, embed_dim, mlp_dim)),
        "expert_ids": (expert_ids, (num_rows, expert_ids.shape[-1])),
        "weights": (weights, expert_ids.shape),
    }
    for name, (value, shape) in expected.items():
        if value.shape != shape:
            raise ValueError(f"routed_mlp({name}=...) must be {list(shape)}; got {value.dtype} {value.shape}")


class _Form(NamedTuple):
    activation: Callable[[jax.Array], jax.Array]
    implementation: ExpertsImplementation


# The loops have a dynamic number of steps, which reverse mode cannot take by itself.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed(form, x, gate_up, down, expert_ids, weights):
    return _folded(form)(x, gate_up, down, expert_ids, weights)


def _routed_forward(form, x, gate_up, down, expert_ids, weights):
    return _routed(form, x, gate_up, down, expert_ids, weights), (x, gate_up, down, expert_ids, weights)


def _routed_backward(form, saved, out_grad):
    x, gate_up, down, expert_ids, weights = saved
    if isinstance(gate_up, QuantizedWeight):

        def of_rows(x, weights):
            return _ragged(form, x, gate_up, down, expert_ids, weights)

        x_grad, weights_grad = jax.vjp(of_rows, x, weights)[1](out_grad)
        gate_up_grad = down_grad = None
    elif form.implementation == "ragged":

        def ragged(x, gate_up, down, weights):
            return _ragged(form, x, gate_up, down, expert_ids, weights)

        _, pull = jax.vjp(ragged, x, gate_up, down, weights)
        x_grad, gate_up_grad, down_grad, weights_grad = pull(out_grad)
    else:
        # Every element of a vmapped axis has gradients of the whole bank: one element at a time.
        backward = jax.custom_batching.sequential_vmap(functools.partial(_blocked_backward, form))
        x_grad, gate_up_grad, down_grad, weights_grad = backward(
            x, gate_up, down, expert_ids, weights, out_grad
        )
    return x_grad, gate_up_grad, down_grad, None, weights_grad


_routed.defvjp(_routed_forward, _routed_backward)


def _folded(form: _Form) -> Callable[..., jax.Array]:
    """The forward pass, for which a vmapped axis of rows is more rows."""
    run = functools.partial(_blocked if form.implementation == "blocked" else _ragged, form)
    folded = jax.custom_batching.custom_vmap(run)

    @folded.def_vmap
    def rule(axis_size, in_batched, *args):
        if any(jax.tree.leaves(in_batched[1:3])):  # banks that differ share nothing
            axes = tuple(jax.tree.map(lambda batched: 0 if batched else None, in_batched))
            return jax.vmap(jax.custom_batching.sequential_vmap(run), axes)(*args), True

        def fold(arg: jax.Array, batched: bool) -> jax.Array:
            whole = arg if batched else jnp.broadcast_to(arg, (axis_size, *arg.shape))
            return whole.reshape(-1, whole.shape[-1])

        x, expert_ids, weights = (fold(args[i], in_batched[i]) for i in (0, 3, 4))
        out = folded(x, *args[1:3], expert_ids, weights)
        return out.reshape(axis_size, -1, out.shape[-1]), True

    return folded


class _Segments(NamedTuple):
    """Pairs sorted by expert: those of one expert are a segment. P = N * k pairs.

    expert: of each sorted pair, int32 [P].
    token: row of x of each sorted pair, int32 [P + a large block], zeros at the end.
    rank: where pair (n, j) stands, int32 [N, k].
    ends: of the experts' segments, exclusive, int32 [E].
    """

    expert: jax.Array
    token: jax.Array
    rank: jax.Array
    ends: jax.Array


def _segments(expert_ids: jax.Array, num_experts: int) -> _Segments:
    flat = expert_ids.reshape(-1)
    expert, order = lax.sort((flat, jnp.arange(flat.size, dtype=jnp.int32)), num_keys=1, is_stable=True)
    # Counting is a single fused pass; searching or scattering compiles to loops.
    ends = jnp.sum(flat[:, None] <= jnp.arange(num_experts, dtype=flat.dtype), axis=0, dtype=jnp.int32)
    return _Segments(
        expert=expert,
        token=jnp.pad(order // expert_ids.shape[1], (0, _LARGE_BLOCK)),
        rank=jnp.argsort(order).astype(jnp.int32).reshape(expert_ids.shape),
        ends=ends,
    )


def _for_each_expert(segments: _Segments, gate_up: Weight, down: Weight, carry, body: Callable):
    """Runs `carry = body(carry, expert, start, its gate_up, its down)` over the segments, in order."""

    def step(loop):
        # Tied to the position, or XLA's CPU compiler (seen in jax 0.10.2) takes a float32 copy of the whole
        # bfloat16 bank out of the loop.
        start, *banks = lax.optimization_barrier((loop[0], gate_up, down))
        expert = segments.expert[start]
        one_gate_up, one_down = jax.tree.map(
            lambda bank: lax.dynamic_index_in_dim(bank, expert, 0, False), tuple(banks)
        )
        return segments.ends[expert], body(loop[1], expert, start, one_gate_up, one_down)

    num_pairs = segments.expert.shape[0]
    return lax.while_loop(lambda loop: loop[0] < num_pairs, step, (jnp.int32(0), carry))[1]


def _for_each_block(start: jax.Array, end: jax.Array, num_rows: int, carry, body: Callable):
    """Runs `carry = body(carry, start, block)` over the blocks of one segment, in order."""
    if num_rows <= _FEW_ROWS:  # an expert has at most one pair a row
        return body(carry, start, num_rows)

    def run(start, block, num_blocks, carry):
        return lax.fori_loop(0, num_blocks, lambda i, carry: body(carry, start + i * block, block), carry)

    num_large = (end - start) // _LARGE_BLOCK
    carry = run(start, _LARGE_BLOCK, num_large, carry)
    start = start + num_large * _LARGE_BLOCK
    return run(start, _SMALL_BLOCK, -((start - end) // _SMALL_BLOCK), carry)


def _expert(
    activation: Callable[[jax.Array], jax.Array], x: jax.Array, gate_up: Weight, down: Weight
) -> jax.Array:
    """One expert's output, float32 [rows, D]."""
    projected = linear(x, gate_up)
    return linear(activation(projected[:, 0]) * projected[:, 1], down)


def _blocked(
    form: _Form,
    x: jax.Array,
    gate_up: Weight,
    down: Weight,
    expert_ids: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    segments = _segments(expert_ids, gate_up.shape[0])

    def run_expert(out, expert, start, one_gate_up, one_down):
        def run_block(out, start, block):
            rows = x[lax.dynamic_slice_in_dim(segments.token, start, block)]
            # What a block writes behind its segment is overwritten by the segments that follow.
            return lax.dynamic_update_slice_in_dim(
                out, _expert(form.activation, rows, one_gate_up, one_down), start, 0
            )

        return _for_each_block(start, segments.ends[expert], x.shape[0], out, run_block)

    out = jnp.zeros((segments.token.shape[0], x.shape[1]), jnp.float32)
    out = _for_each_expert(segments, gate_up, down, out, run_expert)
    return _summed(out, segments.rank, weights)


def _summed(pairs: jax.Array, rank: jax.Array, weights: jax.Array) -> jax.Array:
    """Each row's pairs, weighted and summed: [N, D]."""
    terms = (pairs[rank[:, j]] * weights[:, j, None] for j in range(rank.shape[1]))
    return sum(terms, start=jnp.float32(0))


def _blocked_backward(form, x, gate_up, down, expert_ids, weights, out_grad):
    """Gradients of `_blocked` in x, gate_up, down and weights; each block is computed anew."""
    segments = _segments(expert_ids, gate_up.shape[0])
    num_slots = segments.token.shape[0]
    pair_weights = jnp.zeros(num_slots, weights.dtype).at[segments.rank].set(weights)

    def run_expert(carry, expert, start, one_gate_up, one_down):
        x_grads, weight_grads, gate_up_grad, down_grad = carry
        end = segments.ends[expert]

        def run_block(carry, start, block):
            x_grads, weight_grads, expert_grads = carry
            token = lax.dynamic_slice_in_dim(segments.token, start, block)
            live = start + jnp.arange(block) < end
            out, pull = jax.vjp(functools.partial(_expert, form.activation), x[token], one_gate_up, one_down)
            scale = jnp.where(live, lax.dynamic_slice_in_dim(pair_weights, start, block), 0)
            grad = out_grad[token]
            x_grad, *more = pull(jnp.where(live[:, None], grad * scale[:, None], 0))
            update = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
            return (
                update(x_grads, x_grad.astype(jnp.float32)),
                update(weight_grads, jnp.sum(out * grad, axis=-1)),
                tuple(a + b.astype(jnp.float32) for a, b in zip(expert_grads, more, strict=True)),
            )

        zeros = tuple(jnp.zeros(part.shape, jnp.float32) for part in (one_gate_up, one_down))
        x_grads, weight_grads, expert_grads = _for_each_block(
            start, end, x.shape[0], (x_grads, weight_grads, zeros), run_block
        )
        banks = (
            lax.dynamic_update_index_in_dim(bank, part.astype(bank.dtype), expert, 0)
            for bank, part in zip((gate_up_grad, down_grad), expert_grads, strict=True)
        )
        return x_grads, weight_grads, *banks

    carry = (
        jnp.zeros((num_slots, x.shape[1]), jnp.float32),
        jnp.zeros(num_slots, jnp.float32),
        jnp.zeros_like(gate_up),
        jnp.zeros_like(down),
    )
    x_grads, weight_grads, gate_up_grad, down_grad = _for_each_expert(
        segments, gate_up, down, carry, run_expert
    )
    x_grad = _summed(x_grads, segments.rank, jnp.ones_like(weights)).astype(x.dtype)
    return x_grad, gate_up_grad, down_grad, weight_grads[segments.rank].astype(weights.dtype)


def _ragged(
    form: _Form,
    x: jax.Array,
    gate_up: Weight,
    down: Weight,
    expert_ids: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    segments = _segments(expert_ids, gate_up.shape[0])
    rows = x[segments.token[: expert_ids.size]]
    dot = functools.partial(
        lax.ragged_dot,
        group_sizes=jnp.diff(segments.ends, prepend=0),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )

    def project(rows: jax.Array, bank: Weight, part: int | None) -> jax.Array:
        index = (slice(None),) if part is None else (slice(None), part)
        if not isinstance(bank, QuantizedWeight):
            return dot(rows, jnp.swapaxes(bank[index], 1, 2))
        values = bank.values[index].astype(bank.dtype)
        return dot(rows, jnp.swapaxes(values, 1, 2)) * bank.scale[index][segments.expert]

    gate, up = (project(rows, gate_up, part) for part in (0, 1))
    out = project((form.activation(gate) * up).astype(down.dtype), down, None)
    return _summed(out, segments.rank, weights)
