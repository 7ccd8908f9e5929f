"""Images in a conversation: kept as files' bytes, so that it can be saved and answered by another model."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

from jaxinfer.generation.image_features import tower_of
from jaxinfer.images import ImageSource, PreparedImage, image_file, prepare_image
from jaxinfer.models import Model


@dataclasses.dataclass(frozen=True)
class ChatImage:
    """One image of a question.

    Attributes:
      file: the bytes of an image file: what was read, or a PNG of what was given as pixels.
      prepared: what the model's tower takes of it.
    """

    file: bytes = dataclasses.field(repr=False)
    prepared: PreparedImage

    @property
    def key(self) -> str:
        """SHA-256 of the file, as hex."""
        return hashlib.sha256(self.file).hexdigest()


def read_images(model: Model, sources: Sequence[ImageSource | ChatImage]) -> tuple[ChatImage, ...]:
    """Returns images to keep; those that were read before are taken as they are.

    Raises:
      ImageError: one cannot be taken, or the model reads no images.
    """
    if not isinstance(sources, list | tuple):
        raise ValueError(f"ChatSession.send(images=...) must be a list; got {type(sources).__name__}")
    out: list[ChatImage] = []
    for index, source in enumerate(sources):
        tower, name = tower_of(model, "images"), f"images[{index}]"
        if not isinstance(source, ChatImage):
            file = image_file(source, name)
            # A path names the image in errors; what is kept is what was read.
            shown = f"{name} ({source})" if isinstance(source, str) else name
            source = ChatImage(file, prepare_image(file, tower, name=shown))
        out.append(source)
    return tuple(out)


def image_records(images: Iterable[ChatImage]) -> dict[str, str]:
    """Returns the files of images as base64 text by key, each once."""
    return {image.key: base64.b64encode(image.file).decode() for image in images}


def read_records(model: Model, records: Mapping[str, str]) -> dict[str, ChatImage]:
    """Returns the images of `image_records` by key, prepared for `model`; ImageError where it reads none."""
    return {key: read_images(model, [base64.b64decode(text)])[0] for key, text in records.items()}
