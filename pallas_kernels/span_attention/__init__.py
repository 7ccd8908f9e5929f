"""Attention in which every query reads one contiguous span of key rows."""

from pallas_kernels.span_attention.api import Implementation, available_implementations, span_attention
from pallas_kernels.span_attention.paged_api import PagedImplementation, paged_span_attention

__all__ = [
    "Implementation",
    "PagedImplementation",
    "available_implementations",
    "paged_span_attention",
    "span_attention",
]
