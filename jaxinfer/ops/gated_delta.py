"""The gated delta rule and the convolution before it: the package's one door to the gated delta kernels."""

from jaxinfer.ops.causal_conv import causal_conv, conv_history
from pallas_kernels.gated_delta import available_implementations as gated_delta_implementations
from pallas_kernels.gated_delta import gated_delta_chunk, gated_delta_step

__all__ = [
    "causal_conv",
    "conv_history",
    "gated_delta_chunk",
    "gated_delta_implementations",
    "gated_delta_step",
]
