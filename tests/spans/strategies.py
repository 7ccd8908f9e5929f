"""Random flags for the span tests: runs of every length, in a few lengths so that compiles are few."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from jaxinfer.spans import MaskPolicy

Q_LENS = (1, 5, 12)
WINDOWS = (None, 1, 4)
POLICIES = st.sampled_from(list(MaskPolicy))
OFFSETS = st.integers(0, 20)


def flags(q_len: int) -> st.SearchStrategy[np.ndarray]:
    """Bool [q_len]: a mix of independent flags and of long runs."""
    stretch = st.tuples(st.booleans(), st.integers(1, 6))
    runs = st.lists(stretch, min_size=q_len, max_size=q_len).map(
        lambda stretches: [flag for flag, length in stretches for _ in range(length)][:q_len]
    )
    singles = st.lists(st.booleans(), min_size=q_len, max_size=q_len)
    return st.one_of(runs, singles).map(lambda values: np.array(values, bool))


ANY_FLAGS = st.sampled_from(Q_LENS).flatmap(flags)
