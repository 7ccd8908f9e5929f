"""From logits to tokens: sampling options, the draw, and log-probabilities.

Every function takes whole batches and works under `jit`, `vmap` and `scan`. A draw depends on the row's
logits, options and seed, and on how many tokens the row has generated: never on its neighbours, its slot
or the batch size.
"""

from jaxinfer.sampling.draw import SampleResult, mark_seen, sample
from jaxinfer.sampling.logprobs import token_logprobs, top_logprobs
from jaxinfer.sampling.options import RowSampling, Sampling, stack_sampling

__all__ = [
    "RowSampling",
    "SampleResult",
    "Sampling",
    "mark_seen",
    "sample",
    "stack_sampling",
    "token_logprobs",
    "top_logprobs",
]
