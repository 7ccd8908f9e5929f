"""One decoder for every family: embeddings, the layers one after another, logits.

`forward` is a pure function of params, tokens and state. Called plainly it checks what the host can see and
raises; under `jit`, `vmap`, `scan` or `grad` the same faults set bits in `state.status` and make the row's
logits NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.models.inputs import Aux, GivenLogits, LogitsMode, StepInputs, check_call
from jaxinfer.models.params import DecoderParams
from jaxinfer.nn import block
from jaxinfer.ops import AttentionImplementation, embed, linear, rms_norm, rope_tables
from jaxinfer.state import Checkpoint, DecodeState, Status, Step, make_step

# A step from a state gives a state, one from nothing gives nothing.
_State = TypeVar("_State", bound=DecodeState | None)


@overload
def forward(
    params: DecoderParams,
    tokens: ArrayLike,
    state: _State = None,
    *,
    config: ModelConfig,
    inputs: StepInputs | None = None,
    logits: GivenLogits = "last",
    implementation: AttentionImplementation | None = None,
) -> tuple[jax.Array, _State]: ...
@overload
def forward(
    params: DecoderParams,
    tokens: ArrayLike,
    state: _State = None,
    *,
    config: ModelConfig,
    inputs: StepInputs | None = None,
    logits: LogitsMode,
    implementation: AttentionImplementation | None = None,
) -> tuple[jax.Array | None, _State]: ...
def forward(
    params: DecoderParams,
    tokens: ArrayLike,
    state: DecodeState | None = None,
    *,
    config: ModelConfig,
    inputs: StepInputs | None = None,
    logits: LogitsMode = "last",
    implementation: AttentionImplementation | None = None,
) -> tuple[jax.Array | None, DecodeState | None]:
    """Returns (logits float32, the state after the tokens); the state that came in stays valid.

    Args:
      tokens: int32 [B, T].
      state: what came before, from `init_state` or an earlier step; None: nothing, and nothing is kept.
      inputs: real lengths of right-padded rows, image columns and more; see `StepInputs`.
      logits: "last": [B, V] after each row's last real token, zeros for an empty row; "all": [B, T, V],
        padding columns hold no meaning; "columns": [B, k, V] at `inputs.logit_columns`; "none": None.
      implementation: of span attention, "reference", "xla", "native", "pallas_tpu" or "pallas_gpu"; None
        takes the best that the device and the shapes allow.

    `config`, `logits` and `implementation` are static. A new shape of `tokens` compiles a new program; a
    new length does not. Without donation the cache is copied once a step; inside your own loop use
    `jax.jit(step, donate_argnums=...)`.

    Raises:
      ValueError: shapes or dtypes that do not fit; and, where values are known on the host: a token id
        outside the vocabulary, more tokens than the capacity, a step that continues a begun image run.
    """
    if inputs is not None and inputs.checkpoint_at is not None:
        raise ValueError("forward(inputs.checkpoint_at=...) gives no checkpoints; call forward_with_aux")
    out, state, _ = forward_with_aux(
        params, tokens, state, config=config, inputs=inputs, logits=logits, implementation=implementation
    )
    return out, state


@overload
def forward_with_aux(
    params: DecoderParams,
    tokens: ArrayLike,
    state: _State = None,
    *,
    config: ModelConfig,
    inputs: StepInputs | None = None,
    logits: GivenLogits = "last",
    implementation: AttentionImplementation | None = None,
) -> tuple[jax.Array, _State, Aux]: ...
@overload
def forward_with_aux(
    params: DecoderParams,
    tokens: ArrayLike,
    state: _State = None,
    *,
    config: ModelConfig,
    inputs: StepInputs | None = None,
    logits: LogitsMode,
    implementation: AttentionImplementation | None = None,
) -> tuple[jax.Array | None, _State, Aux]: ...
def forward_with_aux(
    params: DecoderParams,
    tokens: ArrayLike,
    state: DecodeState | None = None,
    *,
    config: ModelConfig,
    inputs: StepInputs | None = None,
    logits: LogitsMode = "last",
    implementation: AttentionImplementation | None = None,
) -> tuple[jax.Array | None, DecodeState | None, Aux]:
    """Returns (logits, state, `Aux`): what `forward` does, and what a step can tell beside it.

    `inputs.checkpoint_at` takes checkpoints inside the step, from its first position to the one after its
    last real token, before eviction drops the rows that they need: `aux.checkpoints[i]` holds each row at
    `checkpoint_at[:, i]`. Take the same lengths with every chunk of a prompt: each chunk's `valid` says
    which of them fell into it.
    """
    tokens = jnp.asarray(tokens) if not isinstance(tokens, np.ndarray) else tokens
    inputs = inputs if inputs is not None else StepInputs()
    check_call(tokens, state, inputs, logits, config)
    return _forward(
        params,
        jnp.asarray(tokens, jnp.int32),
        state,
        inputs,
        config=config,
        logits=logits,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=("config", "logits", "implementation"))
def _forward(
    params: DecoderParams,
    tokens: jax.Array,
    state: DecodeState | None,
    inputs: StepInputs,
    *,
    config: ModelConfig,
    logits: LogitsMode,
    implementation: AttentionImplementation | None,
) -> tuple[jax.Array | None, DecodeState | None, Aux]:
    batch, q_len = tokens.shape
    start = jnp.zeros(batch, jnp.int32) if state is None else state.length
    lengths = jnp.full(batch, q_len, jnp.int32) if inputs.lengths is None else inputs.lengths
    step = make_step(
        config,
        start,
        lengths,
        inputs.is_image,
        q_len=q_len,
        capacity=None if state is None else state.capacity,
    )
    if inputs.checkpoint_at is not None:
        reached = jnp.clip(inputs.checkpoint_at, step.start[:, None], step.end[:, None])
        step = dataclasses.replace(step, checkpoint_at=reached)
    status = _step_status(tokens, step, lengths, state, inputs, config)
    ropes = _rope_tables(config, step, state, inputs, q_len)
    x = _embed(params, tokens, inputs, config)
    layer_states, saved = [], []
    for index, layer in enumerate(config.layers):
        x, layer_state, layer_saved = block(
            params.layers[index],
            x,
            None if state is None else state.layers[index],
            step,
            ropes.get(layer.rope),
            config=config,
            layer=layer,
            implementation=implementation,
        )
        if inputs.deepstack is not None and index < inputs.deepstack.shape[0]:
            x = x + inputs.deepstack[index]
        layer_states.append(layer_state)
        saved.append(layer_saved)
    out = _logits(params, x, step, status, inputs, config=config, mode=logits)
    if state is None:
        return out, None, Aux()
    after = _next_state(state, tuple(layer_states), step, status, inputs)
    checkpoints = tuple(
        _checkpoint(state, after, step, inputs, index, tuple(layer[index] for layer in saved))
        for index in range(len(step.checkpoint_lengths))
    )
    return out, after, Aux(checkpoints)


def _embed(params: DecoderParams, tokens: jax.Array, inputs: StepInputs, config: ModelConfig) -> jax.Array:
    x = embed(params.embedding, tokens)
    if config.scale_embeddings:
        # The scale is rounded as the weights are: bfloat16 models were trained with the rounded one.
        x = x * jnp.sqrt(jnp.float32(config.embed_dim)).astype(config.dtype).astype(jnp.float32)
    if inputs.embeddings is not None:
        assert inputs.embedding_mask is not None  # held by check_call
        x = jnp.where(inputs.embedding_mask[..., None], inputs.embeddings.astype(jnp.float32), x)
    return x


def _rope_tables(
    config: ModelConfig, step: Step, state: DecodeState | None, inputs: StepInputs, q_len: int
) -> dict[RopeConfig | None, tuple[jax.Array, jax.Array]]:
    positions = inputs.positions
    if positions is None:
        first = step.start
        if state is not None and state.rope_delta is not None:
            first = first + state.rope_delta
        positions = first[:, None] + jnp.arange(q_len, dtype=jnp.int32)
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    return {rope: rope_tables(rope, positions) for rope in ropes}


def _step_status(
    tokens: jax.Array,
    step: Step,
    lengths: jax.Array,
    state: DecodeState | None,
    inputs: StepInputs,
    config: ModelConfig,
) -> jax.Array:
    """Returns each row's status after this step, int32 [B]."""
    real = jnp.arange(tokens.shape[1], dtype=jnp.int32) < lengths[:, None]
    unknown = real & ((tokens < 0) | (tokens >= config.vocab_size))
    if inputs.embedding_mask is not None:
        unknown &= ~inputs.embedding_mask
    status = jnp.where(jnp.any(unknown, axis=1), int(Status.BAD_TOKEN), 0)
    status |= jnp.where(lengths > step.lengths, int(Status.OVERFLOWED), 0)
    if state is None:
        return status
    if state.ends_in_image is not None and inputs.is_image is not None:
        cut = state.ends_in_image & inputs.is_image[:, 0] & real[:, 0]
        status |= jnp.where(cut, int(Status.CUT_RUN), 0)
    return status | state.status


def _next_state(
    state: DecodeState, layers: tuple, step: Step, status: jax.Array, inputs: StepInputs
) -> DecodeState:
    columns = state.image_columns
    if columns is not None and inputs.is_image is not None:
        position, real = _column_positions(step, inputs.is_image.shape[1], step.end)
        row = jnp.arange(state.batch)[:, None]
        position = jnp.where(real, position, columns.shape[1])
        columns = columns.at[row, position].set(inputs.is_image, mode="drop")
    rope_delta, image_end = _rope_memory(state, step, inputs, step.end)
    return dataclasses.replace(
        state,
        layers=layers,
        length=step.end,
        status=status,
        image_columns=columns,
        rope_delta=rope_delta,
        image_end=image_end,
    )


def _checkpoint(
    state: DecodeState, after: DecodeState, step: Step, inputs: StepInputs, index: int, layers: tuple
) -> Checkpoint:
    """Returns the checkpoint at column `index` of `checkpoint_at`, of a step from `state` to `after`."""
    assert inputs.checkpoint_at is not None  # `index` is one of its columns
    asked, reached = inputs.checkpoint_at[:, index], step.checkpoint_lengths[index]
    valid = (asked == reached) & ~after.cuts_image_run(reached)
    rope_delta, image_end = _rope_memory(state, step, inputs, reached)
    return Checkpoint(jnp.where(valid, reached, -1), valid, layers, rope_delta, image_end)


def _column_positions(step: Step, q_len: int, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the position of each column, int32 [B, T], and whether it is below `length`, bool [B, T]."""
    position = step.start[:, None] + jnp.arange(q_len, dtype=jnp.int32)
    return position, position < length[:, None]


def _rope_memory(
    state: DecodeState, step: Step, inputs: StepInputs, length: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns `rope_delta` and `image_end` of the state at `length`, which lies within the step."""
    if state.rope_delta is None or state.image_end is None:
        return None, None
    delta, image_end = state.rope_delta, state.image_end
    if inputs.positions is not None:
        # Text goes on from the highest position so far, on any axis; what deviates from that is an image.
        axes = jnp.reshape(inputs.positions, (-1, *inputs.positions.shape[-2:]))
        position, real = _column_positions(step, axes.shape[2], length)
        highest = jnp.max(jnp.where(real, axes, -1), axis=(0, 2))
        delta = jnp.where(length > step.start, highest + 1 - length, delta)
        deviates = jnp.any(axes != position + delta[:, None], axis=0)
        last = jnp.max(jnp.where(real & deviates, position + 1, 0), axis=1)
        image_end = jnp.maximum(image_end, jnp.where(delta != state.rope_delta, step.start, 0))
        image_end = jnp.maximum(image_end, last)
    if inputs.is_image is not None:
        position, real = _column_positions(step, inputs.is_image.shape[1], length)
        last = jnp.max(jnp.where(real & inputs.is_image, position + 1, 0), axis=1)
        image_end = jnp.maximum(image_end, last)
    return delta, image_end


def _logits(
    params: DecoderParams,
    x: jax.Array,
    step: Step,
    status: jax.Array,
    inputs: StepInputs,
    *,
    config: ModelConfig,
    mode: LogitsMode,
) -> jax.Array | None:
    if mode == "none":
        return None
    if mode == "last":
        x = jnp.take_along_axis(x, jnp.maximum(step.lengths - 1, 0)[:, None, None], axis=1)
    elif mode == "columns":
        assert inputs.logit_columns is not None  # held by check_call
        columns = inputs.logit_columns
        is_real = (columns >= 0) & (columns < step.lengths[:, None])
        x = jnp.take_along_axis(x, jnp.where(is_real, columns, 0)[:, :, None], axis=1)
    x = rms_norm(x, params.final_norm, config.norm_eps)
    out = linear(x, params.embedding if params.lm_head is None else params.lm_head)
    if config.final_logit_soft_cap is not None:
        out = config.final_logit_soft_cap * jnp.tanh(out / config.final_logit_soft_cap)
    if mode == "last":
        out = jnp.where((step.lengths > 0)[:, None], out[:, 0], 0.0)
    elif mode == "columns":
        out = jnp.where(is_real[:, :, None], out, jnp.nan)
    bad = (status != 0).reshape(-1, *([1] * (out.ndim - 1)))
    return jnp.where(bad, jnp.nan, out)
