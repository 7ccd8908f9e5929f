"""Which keys a query may read: one inclusive span of positions a query, and the plans that respect it."""

from jaxinfer.spans.builder import KeySpans as KeySpans
from jaxinfer.spans.builder import key_spans as key_spans
from jaxinfer.spans.chunks import ImageRunTooLongError as ImageRunTooLongError
from jaxinfer.spans.chunks import chunk_splits_image_run as chunk_splits_image_run
from jaxinfer.spans.chunks import plan_prefill_chunks as plan_prefill_chunks
from jaxinfer.spans.draw import draw_key_spans as draw_key_spans
from jaxinfer.spans.policy import MaskPolicy as MaskPolicy
from jaxinfer.spans.ragged import batch_span_ends as batch_span_ends
