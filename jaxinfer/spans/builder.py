"""Key spans of a dense step: consecutive columns of one or more rows.

A span is inclusive at both ends and in absolute positions. `lo` comes from the query's own position and
the window alone; `hi` from the policy alone. The two never meet, so widening the top of an image run does
not drag its floor.
"""

from __future__ import annotations

import functools
import operator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.spans.flags import ImageFlags, check_flags, known_text_only
from jaxinfer.spans.policy import MaskPolicy, check_policy

_INT32_MAX = 2**31 - 1


@flax.struct.dataclass
class KeySpans:
    """The keys that each query may read, one span a query; a span with `hi < lo` is empty.

    Three text columns under a window of 2 have `lo = 0 0 1`, `hi = 0 1 2`, and as a mask::

        1 . .
        1 1 .
        . 1 1

    Attributes:
        lo: first key read, int32 [..., T].
        hi: last key read, int32 [..., T]. An attention output row with an empty span is zeros.
    """

    lo: jax.Array
    hi: jax.Array

    def as_mask(self, kv_len: int) -> jax.Array:
        """Returns the dense mask over keys 0 to `kv_len - 1`: bool [..., T, S], True where read.

        For references and small checks: it takes T * S bytes a row, where spans take 8 * T.

        Args:
            kv_len: number of keys S, a Python int of at least 0.

        Raises:
            ValueError: `kv_len` is no int or negative, or `lo` and `hi` differ in shape.
        """
        size = _static_int(kv_len, "KeySpans.as_mask", "kv_len")
        if jnp.shape(self.lo) != jnp.shape(self.hi):
            raise ValueError(
                f"KeySpans(lo=..., hi=...) must have one shape [..., T]; got {jnp.shape(self.lo)} and "
                f"{jnp.shape(self.hi)}"
            )
        shape = (*jnp.shape(self.lo), size)
        keys = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        lo = jnp.broadcast_to(jnp.expand_dims(self.lo, -1), shape)
        hi = jnp.broadcast_to(jnp.expand_dims(self.hi, -1), shape)
        return (keys >= lo) & (keys <= hi)


def key_spans(
    policy: MaskPolicy,
    is_image: ImageFlags,
    window: int | None = None,
    *,
    offset: int | jax.Array | np.ndarray = 0,
) -> KeySpans:
    """Returns the span of keys that each of T consecutive columns may read, in absolute positions.

    With q the absolute position of a column (`offset` plus its index)::

        lo = 0 without a window, else max(0, q - window + 1)
        hi = q, or under VISION_BIDIRECTIONAL in an image run the last position of that run

    `is_image = 0 1 1 1 0`, VISION_BIDIRECTIONAL, window 2: `lo = 0 0 1 2 3`, `hi = 0 3 3 3 4`, as a mask
    (rows are queries, columns are keys)::

        1 . . . .
        1 1 1 1 .
        . 1 1 1 .
        . . 1 1 .
        . . . 1 1

    A run is a maximal stretch of set flags within this call; images side by side are one run. Nothing
    looks for runs, and the flags are not read, under CAUSAL, where T is 1 (so a decode step is plain
    causal), and where the flags are a NumPy array or a list without a set flag: a call that is known to
    be all text passes `np.zeros((batch, q_len), bool)`.

    Args:
        policy: the layer's mask policy; static.
        is_image: bool [..., T], True for columns of images; padding columns are False.
        window: keys a query reads back, itself included; None or 0: all of them. Static.
        offset: position of the first column: an int, or int32 of a shape that broadcasts against the
            leading axes of `is_image` (one a row: [B] with [B, T]). May be traced.

    Returns:
        KeySpans of int32 [..., T], the leading axes broadcast with those of `offset`; T = 0 gives
        [..., 0].

    Raises:
        ValueError: `policy` is no MaskPolicy; `is_image` is not bool or has no axis; `window` is
            negative or no Python int; `offset` is neither an int nor int32, does not broadcast, or is
            known on the host to put a position below 0 or past int32.
    """
    check_policy(policy, "key_spans")
    flags = check_flags(is_image, "key_spans", axes="[..., T]", rank=None)
    reach = 0 if window is None else _static_int(window, "key_spans", "window")
    start = _checked_offset(offset, flags.shape)
    run_flags = flags
    if policy is MaskPolicy.CAUSAL or flags.shape[-1] <= 1 or known_text_only(flags):
        run_flags = None
    shape = (*np.broadcast_shapes(flags.shape[:-1], start.shape), flags.shape[-1])
    return _spans(start, run_flags, shape=shape, reach=reach)


@functools.partial(jax.jit, static_argnames=("shape", "reach"))  # one dispatch when called outside jit
def _spans(offset: jax.Array, run_flags: jax.Array | None, *, shape: tuple[int, ...], reach: int) -> KeySpans:
    """Returns the spans of columns of `shape`; `run_flags` None: no column reads forward, reach 0: lo = 0."""
    first = jnp.broadcast_to(jnp.expand_dims(offset, -1), shape)
    query = first + lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    lo = jnp.maximum(query - jnp.int32(reach - 1), 0) if reach else jnp.zeros_like(query)
    if run_flags is None:
        return KeySpans(lo=lo, hi=query)
    return KeySpans(lo=lo, hi=query + jnp.broadcast_to(_columns_left_in_run(run_flags), shape))


def _columns_left_in_run(flags: jax.Array) -> jax.Array:
    """Returns how many columns of its own run follow each column, 0 for text: int32 [..., T], T >= 2."""
    index = lax.broadcasted_iota(jnp.int32, flags.shape, flags.ndim - 1)
    ends_here = ~jnp.concatenate([flags[..., 1:], jnp.zeros_like(flags[..., :1])], axis=-1)
    # The nearest end at or after a column: ends are the only indices below T in the minimum.
    run_end = lax.cummin(jnp.where(ends_here, index, flags.shape[-1]), axis=flags.ndim - 1, reverse=True)
    return jnp.where(flags, run_end - index, 0)


def _checked_offset(offset: int | jax.Array | np.ndarray, shape: tuple[int, ...]) -> jax.Array | np.ndarray:
    """Returns `offset` as int32 that broadcasts against the leading axes of flags of `shape`."""
    if not isinstance(offset, jax.Array | np.ndarray):
        offset = np.asarray(_static_int(offset, "key_spans", "offset"), np.int32)
    if offset.dtype != np.int32:
        raise ValueError(
            f"key_spans(offset=...) must be an int or int32; got {offset.dtype} {offset.shape}; "
            "pass the consumed length as int32"
        )
    if isinstance(offset, np.ndarray) and not np.all((offset >= 0) & (offset <= _INT32_MAX - shape[-1])):
        raise ValueError(
            f"key_spans(offset=...) must keep positions of {shape[-1]} columns from 0 to 2**31 - 1; "
            f"got {offset}"
        )
    try:
        np.broadcast_shapes(shape[:-1], offset.shape)
    except ValueError:
        raise ValueError(
            f"key_spans(offset=...) must broadcast against the leading axes {shape[:-1]} of is_image; "
            f"got {offset.shape}; pass one offset a row, or one for all"
        ) from None
    return offset


def _static_int(value: object, caller: str, name: str) -> int:
    """Returns `value` as a Python int from 0 to 2**31 - 1; a bool, a float or an array is a ValueError."""
    try:
        number = -1 if isinstance(value, bool | jax.Array) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= _INT32_MAX:
        raise ValueError(f"{caller}({name}=...) must be a Python int from 0 to 2**31 - 1; got {value!r}")
    return number
