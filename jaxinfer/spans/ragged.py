"""Span ends of a ragged step: columns of several sequences, in any order.

Membership of a run follows sequence and position alone; where a column sits in the batch is irrelevant.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.spans.flags import ImageFlags, check_flags, known_text_only
from jaxinfer.spans.policy import MaskPolicy, check_policy

PADDING_ID = -1  # the sequence id of a column that holds no token, and that column's end


def batch_span_ends(
    policy: MaskPolicy,
    positions: jax.Array | np.ndarray,
    sequence_ids: jax.Array | np.ndarray,
    is_image: ImageFlags,
) -> jax.Array:
    """Returns the last key that each of C columns may read, `hi` of its span in its own sequence.

    A run is a maximal set of image columns of one sequence at consecutive positions; a gap or a text
    column ends it, and it never joins two sequences. Under VISION_BIDIRECTIONAL the end of an image
    column is the largest position of its run that is present in this step; every other end is the
    column's own position. Two sequences, one of them out of order::

        sequence_ids   0  1  0  1  0  -1
        positions      5  0  4  1  6   0
        is_image       1  1  1  0  0   0
        ends           5  0  5  1  6  -1

    Permuting the columns permutes the ends. One sort, O(C log C).

    Args:
        policy: the layer's mask policy; static.
        positions: int32 [C], absolute position of each column in its sequence; a pair of sequence and
            position occurs once.
        sequence_ids: int32 [C], which sequence a column belongs to; a negative id is a padding column.
        is_image: bool [C], True for columns of images; ignored for padding columns.

    Returns:
        int32 [C] in column order; -1 for padding columns.

    Raises:
        ValueError: `policy` is no MaskPolicy, or an array has another dtype, rank or length.
    """
    check_policy(policy, "batch_span_ends")
    flags = check_flags(is_image, "batch_span_ends", axes="[C]", rank=1)
    columns = {"positions": positions, "sequence_ids": sequence_ids}
    for name, column in columns.items():
        found = column if isinstance(column, jax.Array) else np.asarray(column)
        if found.dtype != np.int32 or found.shape != flags.shape:
            raise ValueError(
                f"batch_span_ends({name}=...) must be int32 [C], C = {flags.shape[0]} as in is_image; "
                f"got {found.dtype} {found.shape}"
            )
    run_flags = flags
    if policy is MaskPolicy.CAUSAL or flags.shape[0] <= 1 or known_text_only(flags):
        run_flags = None
    return _ends(positions, sequence_ids, run_flags)


@jax.jit  # one dispatch when called outside jit
def _ends(positions: jax.Array, sequence_ids: jax.Array, run_flags: jax.Array | None) -> jax.Array:
    """Returns the ends of checked columns; `run_flags` None: no column reads forward. int32 [C]."""
    ends = positions
    if run_flags is not None:
        ends = jnp.where(run_flags, _image_run_ends(positions, sequence_ids, run_flags), positions)
    return jnp.where(sequence_ids > PADDING_ID, ends, PADDING_ID)


def _image_run_ends(positions: jax.Array, sequence_ids: jax.Array, is_image: jax.Array) -> jax.Array:
    """Returns the largest position of each image column's run; other entries mean nothing. int32 [C]."""
    index = lax.iota(jnp.int32, positions.shape[0])
    # Text columns go to the padding's sequence: taken out, they leave the gap that ends a run.
    key = jnp.where(is_image, sequence_ids, PADDING_ID)
    key, place, column = lax.sort((key, positions, index), num_keys=2)
    joins_next = (key[1:] == key[:-1]) & (place[1:] - place[:-1] <= 1)
    ends_here = ~jnp.concatenate([joins_next, jnp.zeros(1, bool)])
    run_end = lax.cummin(jnp.where(ends_here, index, positions.shape[0]), reverse=True)
    return jnp.zeros_like(positions).at[column].set(place[run_end], unique_indices=True)
