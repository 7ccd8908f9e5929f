"""Image flags: one bool a column, True where the column belongs to an image.

Flags are explicit and come from whoever placed the image: never from a token id, never from where an
embedding came from. Columns that are padding are flagged False.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

ImageFlags: TypeAlias = jax.Array | np.ndarray | Sequence[bool]


def check_flags(is_image: ImageFlags, caller: str, *, axes: str, rank: int | None) -> jax.Array | np.ndarray:
    """Returns `is_image` as an array, checked to be bool with `rank` axes (None: one or more).

    Arrays of JAX stay as they are, traced ones too; anything else becomes a NumPy array.

    Raises:
        ValueError: another dtype or rank; the message names `caller` and `axes`.
    """
    if isinstance(is_image, list | tuple) and not is_image:
        is_image = np.zeros(0, bool)  # an empty list carries no dtype of its own
    flags = is_image if isinstance(is_image, jax.Array) else np.asarray(is_image)
    wrong_rank = flags.ndim < 1 if rank is None else flags.ndim != rank
    if flags.dtype != np.bool_ or wrong_rank:
        raise ValueError(
            f"{caller}(is_image=...) must be bool {axes}; got {flags.dtype} {flags.shape}; "
            "pass one flag a column, True where the column belongs to an image"
        )
    return flags


def known_text_only(flags: jax.Array | np.ndarray) -> bool:
    """True when the flags are host values and none is set, so that no run has to be looked for."""
    return isinstance(flags, np.ndarray) and not flags.any()
