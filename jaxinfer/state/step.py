"""One forward's columns: which positions they take, which of them are real, and what each may read.

Axes: B batch, T columns. A row's real columns come first; padding columns stand to their right. Positions
count consumed tokens; a layer that dropped rows translates them to its own row numbers.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.spans import KeySpans, MaskPolicy, key_spans

SpanKind = tuple[MaskPolicy, int | None]


@flax.struct.dataclass
class Step:
    """The columns of one forward.

    Attributes:
      start: positions consumed before this step, int32 [B].
      lengths: real columns that the state accepts, int32 [B]; never past the capacity.
      spans: key spans in positions, int32 [B, T], one entry a distinct (policy, window); padding columns
        have empty spans.
      span_kinds: the (policy, window) of each entry of `spans`; static.
      capacity: the bound on positions, None when there is none; static.
      checkpoint_at: lengths to take checkpoints at, int32 [B, k], each from `start` to `end`; None: none.
    """

    start: jax.Array
    lengths: jax.Array
    spans: tuple[KeySpans, ...]
    span_kinds: tuple[SpanKind, ...] = flax.struct.field(pytree_node=False)
    capacity: int | None = flax.struct.field(pytree_node=False)
    checkpoint_at: jax.Array | None = None

    @property
    def checkpoint_lengths(self) -> tuple[jax.Array, ...]:
        """The columns of `checkpoint_at`: k lengths, int32 [B] each."""
        if self.checkpoint_at is None:
            return ()
        return tuple(self.checkpoint_at[:, index] for index in range(self.checkpoint_at.shape[1]))

    @property
    def end(self) -> jax.Array:
        """Positions consumed after this step, int32 [B]."""
        return self.start + self.lengths

    def layer_spans(self, layer: LayerConfig) -> KeySpans:
        """Returns the spans of a layer's queries, in positions."""
        return self.spans[self.span_kinds.index((layer.mask_policy, layer.window))]


def make_step(
    config: ModelConfig,
    start: jax.Array,
    lengths: jax.Array,
    is_image: jax.Array | np.ndarray | None,
    *,
    q_len: int,
    capacity: int | None,
) -> Step:
    """Returns the step of `q_len` columns a row; columns past `capacity` become padding.

    Args:
      start: int32 [B]; lengths: int32 [B], at most `q_len`; is_image: bool [B, T] or None for all text.
    """
    if capacity is not None:
        lengths = jnp.clip(lengths, 0, jnp.maximum(capacity - start, 0))
    valid = jnp.arange(q_len, dtype=jnp.int32) < lengths[:, None]
    if is_image is None:
        flags = np.zeros((start.shape[0], q_len), bool)
    else:
        flags = jnp.asarray(is_image) & valid
    kinds = span_kinds(config)
    spans = []
    for policy, window in kinds:
        span = key_spans(policy, flags, window, offset=start)
        spans.append(KeySpans(jnp.where(valid, span.lo, 0), jnp.where(valid, span.hi, -1)))
    return Step(start, lengths, tuple(spans), kinds, capacity)


def span_kinds(config: ModelConfig) -> tuple[SpanKind, ...]:
    """Returns the distinct (policy, window) of the attention layers, in order of first use."""
    kinds = {(layer.mask_policy, layer.window): None for layer in config.layers if layer.rope is not None}
    return tuple(kinds)
