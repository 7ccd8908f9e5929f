"""Generation: prompts into a state, tokens out of it, text from the tokens."""

from jaxinfer.generation.buckets import plan_prefill_buckets as plan_prefill_buckets
from jaxinfer.generation.generate import generate as generate
from jaxinfer.generation.generate import kv_dtype as kv_dtype
from jaxinfer.generation.ledger import traces as traces
from jaxinfer.generation.prefill import prefill as prefill
from jaxinfer.generation.rows import Generation as Generation
from jaxinfer.generation.rows import StreamChunk as StreamChunk
from jaxinfer.generation.rows import TokenLogprob as TokenLogprob
