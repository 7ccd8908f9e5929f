"""One batch: a state, a prefill, the decode loop; the same compiled functions as `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxinfer.batch.encode import Row, read_row_images
from jaxinfer.batch.plan import Batch
from jaxinfer.generation import Generation, kv_dtype, prefill
from jaxinfer.generation.buckets import MAX_CHUNK
from jaxinfer.generation.image_features import ImageEncoder
from jaxinfer.generation.image_rows import ImageRow, image_row
from jaxinfer.generation.rows import Options, continue_rows, end_token_ids
from jaxinfer.models import Model
from jaxinfer.state import init_state

_PREFILL_COLUMNS = 8192  # of all rows of a step: they bound its working memory
_MIN_CHUNK = 16


def answer_batch(
    model: Model,
    rows: Sequence[Row],
    batch: Batch,
    *,
    folder: Path = Path(),
    on_tokens: Callable[[int], None] | None = None,
) -> list[Generation | str]:
    """Returns for each row its continuation, or one sentence that says why there is none.

    Args:
      rows: the batch's members.
      folder: what the paths of images are relative to.
      on_tokens: called with the number of new tokens after every device call.
    """
    state = init_state(
        model.config,
        batch=batch.num_rows,
        capacity=batch.capacity,
        dtype=kv_dtype(model.config),
        kv_window=model.kv_window,
    )
    token_rows = [row.token_ids for row in rows]
    padding = [()] * (batch.num_rows - len(rows))
    logits, state = prefill(
        model.params,
        [*token_rows, *padding],
        state,
        config=model.config,
        donate=True,
        max_chunk=prefill_chunk(batch.num_rows),
        images=_images(model, rows, folder, len(padding)),
    )
    options = Options(tuple(row.options for row in rows), end_token_ids(model))
    _, answers = continue_rows(model, logits, state, token_rows, options, on_tokens=on_tokens)
    return [
        f"the logits after {len(answer.token_ids)} new tokens are not numbers"
        if answer.failure is not None
        else answer.result()
        for answer in answers
    ]


def prefill_chunk(num_rows: int) -> int:
    """Returns the columns a row of the largest prefill step: a power of two, fewer where rows are many."""
    fair = max(_MIN_CHUNK, _PREFILL_COLUMNS // num_rows)
    return min(MAX_CHUNK, 1 << (fair.bit_length() - 1))


def _images(model: Model, rows: Sequence[Row], folder: Path, padding: int) -> list[ImageRow | None]:
    """Returns what stands behind the placeholders of each row; pixels are read again, and kept for one row.

    Raises:
      ValueError: an image is no longer what it was when the rows were read.
    """
    encoder = ImageEncoder(model)
    shown: list[ImageRow | None] = []
    for row in rows:
        if row.prompt is None:
            shown.append(None)
            continue
        images = read_row_images(model, row.request, folder)
        digests = [digest for _, _, digest in row.prompt.content]
        for path, image, digest in zip(row.request.images, images, digests, strict=True):
            if image.digest != digest:
                raise ValueError(
                    f"{path} (line {row.request.line}) has changed while the job was reading it; start anew "
                    "with --overwrite"
                )
        shown.append(image_row(row.prompt, encoder.features(images)))
    return [*shown, *([None] * padding)]
