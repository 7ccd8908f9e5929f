"""From images to what a tower makes of them: once for each distinct image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import jax

from jaxinfer.config import VisionConfig
from jaxinfer.images import ImageError, ImageSource, PreparedImage, prepare_image
from jaxinfer.models import ImageFeatures, Model, encode_image

_KEEP_BYTES = 256 << 20


def tower_of(model: Model, name: str) -> VisionConfig:
    """Returns what a model's image tower takes; ImageError, which names `name`, where it has none."""
    if model.vision is None or model.config.vision is None:
        raise ImageError(f"{name}: this model reads text alone; it has no image tower")
    return model.config.vision


def prepare_images(
    model: Model, sources: Sequence[ImageSource | PreparedImage], *, name: str = "images"
) -> tuple[PreparedImage, ...]:
    """Returns images as the model's tower takes them; prepared ones are.

    Args:
      name: what errors call the sequence.

    Raises:
      ImageError: one cannot be taken; or the model reads no images.
    """
    if not sources:
        return ()
    tower = tower_of(model, name)
    return tuple(
        source if isinstance(source, PreparedImage) else prepare_image(source, tower, name=f"{name}[{index}]")
        for index, source in enumerate(sources)
    )


class ImageEncoder:
    """A model's tower, and the features it gave last, by digest. Not a value: it belongs to a call or a
    conversation.

    Args:
      keep_bytes: of features kept for the next call, least recently used dropped first.
    """

    def __init__(self, model: Model, *, keep_bytes: int = _KEEP_BYTES):
        self._model, self._keep_bytes = model, keep_bytes
        self._kept: dict[str, ImageFeatures] = {}

    def features(self, images: Iterable[PreparedImage]) -> Mapping[str, ImageFeatures]:
        """Returns the features of images by digest, as numpy arrays; each digest is encoded at most once."""
        distinct = {image.digest: image for image in images}
        found = {}
        for digest, image in distinct.items():
            known = self._kept.pop(digest, None)
            found[digest] = self._encoded(image) if known is None else known
        self._kept |= found
        excess = sum(map(_size_bytes, self._kept.values())) - self._keep_bytes
        for digest in list(self._kept):
            if excess <= 0:
                break
            excess -= _size_bytes(self._kept.pop(digest))
        return found

    def _encoded(self, image: PreparedImage) -> ImageFeatures:
        vision, config = self._model.vision, self._model.config.vision
        assert vision is not None and config is not None  # noqa: PT018 - held by prepare_images
        return jax.device_get(encode_image(vision, image.pixels, config=config, grid=image.grid))


def _size_bytes(features: ImageFeatures) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(features))
