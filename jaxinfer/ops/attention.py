"""Attention over key spans: the package's one door to the attention kernels."""

from pallas_kernels.span_attention import Implementation as AttentionImplementation
from pallas_kernels.span_attention import available_implementations as attention_implementations
from pallas_kernels.span_attention import span_attention

__all__ = ["AttentionImplementation", "attention_implementations", "span_attention"]
