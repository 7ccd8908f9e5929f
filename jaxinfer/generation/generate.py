"""Text in, text out: a batch of prompts to their continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jaxinfer.config import ModelConfig
from jaxinfer.generation.buckets import bucketed_capacity
from jaxinfer.generation.image_features import ImageEncoder
from jaxinfer.generation.image_prompts import PromptImages, encode_image_prompts
from jaxinfer.generation.image_rows import image_row
from jaxinfer.generation.prefill import prefill, score_prompts
from jaxinfer.generation.rows import (
    GREEDY,
    Generation,
    Options,
    Prompt,
    StreamChunk,
    continue_rows,
    encode_prompts,
)
from jaxinfer.models import Model
from jaxinfer.ops import target_platform
from jaxinfer.sampling import Sampling
from jaxinfer.state import init_state


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int,
    images: PromptImages | None = None,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    stop: str | Sequence[str] = (),
    logprobs: int | None = None,
    prompt_logprobs: bool = False,
    stream: Callable[[StreamChunk], None] | None = None,
) -> list[Generation]:
    """Returns one `Generation` a prompt, in order.

    Args:
      prompts: texts (special tokens are added as the tokenizer does for raw text), or rows of token ids; a
        single text stands for a batch of one.
      max_new_tokens: the most tokens to generate a row, at least 1.
      images: for each prompt its images, in the order of their placeholders; for a single text its images
        alone. An image is a Pillow image, a uint8 array, a path, a file's bytes or what `prepare_image`
        gave. A text has the placeholder that the model's chat template writes, once for each image; a row of
        ids has the image token, once for each image or already once for each of its tokens. Equal images are
        encoded once.
      sampling: one for all rows, or one a row. A row's draws depend on its own seed alone.
      stop: strings that end a row; cut from its text.
      logprobs: None for none; k >= 0 for each token's and its k most likely alternatives'.
      prompt_logprobs: also score the prompts.
      stream: called with each piece of text as soon as its tokens are there.

    Raises:
      ValueError: an empty prompt, an id outside the vocabulary, more tokens than the trained length, bad
        options; images that cannot be read, are not as many as the placeholders, or that the model does not
        take (`ImageError`). Nothing has been computed then.
    """
    if images is None:
        rows, shown = encode_prompts(model, prompts), []
    else:
        shown = encode_image_prompts(model, prompts, images)
        rows = [list(row.prompt.token_ids) for row in shown]
    options = Options.checked(model, rows, max_new_tokens, sampling, stop, logprobs)
    longest = max(len(row) for row in rows)
    state = init_state(
        model.config,
        batch=len(rows),
        capacity=bucketed_capacity(longest + max_new_tokens, model.config.max_positions),
        dtype=kv_dtype(model.config),
        kv_window=model.kv_window,
    )
    features = ImageEncoder(model).features(image for row in shown for image in row.images)
    behind = [image_row(row.prompt, features) for row in shown]
    scores = None
    if prompt_logprobs:
        scores = score_prompts(model.params, rows, state, config=model.config, images=behind)
    logits, state = prefill(model.params, rows, state, config=model.config, donate=True, images=behind)
    _, answers = continue_rows(model, logits, state, rows, options, stream=stream)
    return [
        answer.result(None if scores is None else tuple(scores[row])) for row, answer in enumerate(answers)
    ]


def kv_dtype(config: ModelConfig) -> str:
    """Returns the dtype of key/value rows that decodes fastest here.

    The model's own, but float32 on a CPU under jax before 0.11: its compiler converts a whole bfloat16 cache
    to float32 and back at every update.
    """
    slow = target_platform() == "cpu" and jax.__version_info__ < (0, 11)
    return "float32" if slow else config.dtype
