"""The gated delta rule: a recurrent state that decays, and rewrites what it holds under each key."""

from pallas_kernels.gated_delta.api import (
    Implementation,
    available_implementations,
    gated_delta_chunk,
    gated_delta_step,
)

__all__ = ["Implementation", "available_implementations", "gated_delta_chunk", "gated_delta_step"]
