"""Prompts with images as token ids."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from jaxinfer.generation.image_features import prepare_images
from jaxinfer.generation.rows import Prompt, encode_prompts
from jaxinfer.images import (
    ImageError,
    ImageFacts,
    ImagePrompt,
    ImageSource,
    PreparedImage,
    expand_ids,
    expand_text,
    image_prompt,
)
from jaxinfer.models import Model

PromptImages = Sequence[ImageSource | PreparedImage] | Sequence[Sequence[ImageSource | PreparedImage]]


@dataclasses.dataclass(frozen=True)
class ShownPrompt:
    """A prompt and the images behind its placeholders."""

    prompt: ImagePrompt
    images: tuple[PreparedImage, ...]


def encode_image_prompts(
    model: Model, prompts: Prompt | Sequence[Prompt], images: PromptImages
) -> list[ShownPrompt]:
    """Returns each prompt with its images; for what they may be see `generate`.

    Raises:
      ImageError: an image cannot be taken, or there are not as many as placeholders; the message names it.
      ValueError: not one sequence of images for each prompt.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
        if not (len(images) == 1 and isinstance(images[0], list | tuple)):
            images = [images]  # pyright: ignore[reportAssignmentType] - a single text's alone
    if len(images) != len(prompts) or not all(isinstance(row, list | tuple) for row in images):
        raise ValueError(
            f"generate(images=...) must hold a list of images for each of {len(prompts)} prompts; got "
            f"{len(images)} entries, {', '.join(sorted({type(row).__name__ for row in images}))}"
        )
    prepared = [
        prepare_images(model, sources, name=f"images[{index}]")  # pyright: ignore[reportArgumentType]
        for index, sources in enumerate(images)
    ]
    written = []
    for index, (prompt, shown) in enumerate(zip(prompts, prepared, strict=True)):
        with _naming(index):
            written.append(spelled_out(model, prompt, shown) if isinstance(prompt, str) else prompt)
    out = []
    for index, (ids, shown) in enumerate(zip(encode_prompts(model, written), prepared, strict=True)):
        with _naming(index):
            if shown and not isinstance(written[index], str):
                assert model.config.image_token_id is not None  # held by prepare_images
                ids = expand_ids(ids, shown, image_token_id=model.config.image_token_id)
            out.append(ShownPrompt(image_prompt(ids, shown, config=model.config), shown))
    return out


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        raise ImageError(f"prompt {index}: {error}") from None


def spelled_out(model: Model, text: str, images: Sequence[ImageFacts]) -> str:
    """Returns a text with its images' placeholders written out; ImageError where they are not as many."""
    if model.config.vision is None:
        return text
    return expand_text(text, images, config=model.config, spell=lambda token: spelling(model, token))


def spelling(model: Model, token_id: int) -> str:
    """Returns the text of a control token."""
    return model.tokenizer.decode([token_id], skip_special_tokens=False)
