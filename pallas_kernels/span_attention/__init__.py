"""Attention in which every query reads one contiguous span of key rows."""

from pallas_kernels.span_attention.api import Implementation, available_implementations, span_attention

__all__ = ["Implementation", "available_implementations", "span_attention"]
