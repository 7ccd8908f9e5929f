"""Values that the host can see: where they are known, errors are raised instead of marked."""

from __future__ import annotations

import jax
import numpy as np
from jax.core import Tracer


def known(value: jax.Array | np.ndarray | None) -> np.ndarray | None:
    """Returns the value on the host, None where it is absent or traced."""
    return None if value is None or isinstance(value, Tracer) else np.asarray(value)
