"""Operations on arrays: validated, then dispatched to the form that the device runs best."""

from jaxinfer.ops.attention import AttentionImplementation, attention_implementations, span_attention
from jaxinfer.ops.experts import routed_mlp
from jaxinfer.ops.full_attention import full_attention
from jaxinfer.ops.gated_delta import (
    causal_conv,
    conv_history,
    gated_delta_chunk,
    gated_delta_implementations,
    gated_delta_step,
)
from jaxinfer.ops.linear import embed, linear
from jaxinfer.ops.norms import layer_norm, rms_norm
from jaxinfer.ops.quantized_weight import (
    QuantizedWeight,
    Weight,
    is_quantized,
    quantize,
    quantize_into,
    quantized_shape,
)
from jaxinfer.ops.rope import apply_rope, inverse_frequencies, rope_tables
from pallas_kernels.compat import target_platform

__all__ = [
    "AttentionImplementation",
    "QuantizedWeight",
    "Weight",
    "apply_rope",
    "attention_implementations",
    "causal_conv",
    "conv_history",
    "embed",
    "full_attention",
    "gated_delta_chunk",
    "gated_delta_implementations",
    "gated_delta_step",
    "inverse_frequencies",
    "is_quantized",
    "layer_norm",
    "linear",
    "quantize",
    "quantize_into",
    "quantized_shape",
    "rms_norm",
    "rope_tables",
    "routed_mlp",
    "span_attention",
    "target_platform",
]
