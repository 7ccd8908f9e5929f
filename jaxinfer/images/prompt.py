"""Prompts with images: placeholders written out, which columns stand for which image, rope positions.

Whoever writes a prompt, mostly a chat template, puts one placeholder for each image. Written out as the
reference processors of transformers do it:

    Gemma 3      <start_of_image>  ->  \\n\\n <start_of_image> n x <image_soft_token> <end_of_image> \\n\\n
    Qwen's       <|image_pad|>     ->  n x <|image_pad|>
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxinfer.images.errors import ImageError

if TYPE_CHECKING:
    from jaxinfer.config import ModelConfig

Span = tuple[int, int, str]


class ImageFacts(Protocol):
    """What a prompt needs of an image; a `PreparedImage` has it."""

    @property
    def grid(self) -> tuple[int, int, int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def digest(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class ImagePrompt:
    """Token ids, and which of them stand for images.

    Attributes:
      token_ids: each image has as many placeholders as tokens.
      content: (start, end, digest) of each image, end exclusive, ascending.
      positions: of rope, int32 [3, T]; None without images, or for a model whose rope has one axis.
    """

    token_ids: tuple[int, ...]
    content: tuple[Span, ...] = ()
    positions: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)


def expand_text(
    text: str, images: Sequence[ImageFacts], *, config: ModelConfig, spell: Callable[[int], str]
) -> str:
    """Returns `text` with the placeholder of each image written out.

    Args:
      images: in the order of their placeholders.
      spell: gives a token's text.

    Raises:
      ImageError: there are not as many placeholders as images.
    """
    assert config.vision is not None and config.image_token_id is not None  # noqa: PT018 - of image models
    token, begin, end = spell(config.image_token_id), config.vision.begin_token_id, config.vision.end_token_id
    mark, before, after = token, "", ""
    if config.vision.kind == "siglip" and begin is not None and end is not None:
        mark, before, after = spell(begin), f"\n\n{spell(begin)}", f"{spell(end)}\n\n"
    parts = text.split(mark)
    if len(parts) - 1 != len(images):
        raise _count_error(len(parts) - 1, len(images), repr(mark))
    written = [before + token * image.num_tokens + after for image in images]
    return parts[0] + "".join(new + part for new, part in zip(written, parts[1:], strict=True))


def expand_ids(token_ids: Sequence[int], images: Sequence[ImageFacts], *, image_token_id: int) -> list[int]:
    """Returns `token_ids` with each image's placeholder repeated, or as they are where that was done.

    Raises:
      ImageError: the placeholders are neither one for each image nor one for each of the images' tokens.
    """
    ids = list(token_ids)
    count, total = ids.count(image_token_id), sum(image.num_tokens for image in images)
    if count == total:
        return ids
    if count != len(images):
        raise _count_error(count, len(images), f"token {image_token_id}", total)
    out, left = [], iter(images)
    for token in ids:
        out += [token] * (next(left).num_tokens if token == image_token_id else 1)
    return out


def locate_images(
    token_ids: Sequence[int], images: Sequence[ImageFacts], *, image_token_id: int, offset: int = 0
) -> tuple[Span, ...]:
    """Returns the columns of each image among ids whose placeholders are written out.

    Args:
      offset: the column of the first id.

    Raises:
      ImageError: the placeholders are not as many as the images have tokens, or not side by side.
    """
    columns = np.flatnonzero(np.asarray(token_ids, np.int64) == image_token_id)
    total = sum(image.num_tokens for image in images)
    if len(columns) != total:
        raise _count_error(len(columns), len(images), f"token {image_token_id}", total)
    spans, first = [], 0
    for index, image in enumerate(images):
        of_image = columns[first : first + image.num_tokens]
        start, end = int(of_image[0]), int(of_image[-1]) + 1
        if end - start != image.num_tokens:
            raise ImageError(
                f"the {image.num_tokens} placeholders of image {index} are not side by side: they lie in "
                f"columns {start} to {end - 1}"
            )
        spans.append((offset + start, offset + end, image.digest))
        first += image.num_tokens
    return tuple(spans)


def image_prompt(
    token_ids: Sequence[int],
    images: Sequence[ImageFacts],
    *,
    config: ModelConfig,
    content: Sequence[Span] | None = None,
) -> ImagePrompt:
    """Returns a prompt of ids whose placeholders are written out.

    Args:
      content: the columns of each image; None: those of the image token.

    Raises:
      ImageError: as `locate_images`.
    """
    if not images:
        return ImagePrompt(tuple(token_ids))
    assert config.vision is not None and config.image_token_id is not None  # noqa: PT018 - of image models
    if content is None:
        content = locate_images(token_ids, images, image_token_id=config.image_token_id)
    positions = None
    if config.uses_mrope:
        merge = config.vision.merge_size
        grids = [(image.grid[1] // merge, image.grid[2] // merge) for image in images]
        positions = mrope_positions(len(token_ids), [(start, end) for start, end, _ in content], grids)
    return ImagePrompt(tuple(token_ids), tuple(content), positions)


def mrope_positions(
    num_tokens: int, spans: Sequence[tuple[int, int]], grids: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Returns three-axis rope positions, int32 [3, T]: time, row, column.

    Text goes on by one on every axis. An image of h x w tokens that begins at c lies at time c, row c + its
    row, column c + its column; what follows it is at c + max(h, w). With a text token, an image of 2 x 2 and
    a text token::

        time     0  1 1 1 1  3
        row      0  1 1 2 2  3
        column   0  1 2 1 2  3

    Args:
      spans: (start, end) of each image's columns, ascending.
      grids: (rows, columns) of each image in tokens.
    """
    out = np.empty((3, num_tokens), np.int32)
    column = at = 0
    for (start, end), (rows, columns) in zip(spans, grids, strict=True):
        out[:, column:start] = np.arange(at, at + start - column)
        at += start - column
        row, place = np.divmod(np.arange(rows * columns), columns)
        out[:, start:end] = at + np.stack([np.zeros_like(row), row, place])
        at, column = at + max(rows, columns), end
    out[:, column:] = np.arange(at, at + num_tokens - column)
    return out


def _count_error(found: int, images: int, placeholder: str, tokens: int | None = None) -> ImageError:
    wanted = "one for each" if tokens is None else f"one for each, or for each of their {tokens} tokens"
    return ImageError(
        f"the prompt has {found} image placeholders ({placeholder}) for {images} images; write {wanted}"
    )
