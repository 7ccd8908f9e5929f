"""From an image to a tower's input: resize, normalise, and for Qwen's towers the order of patches.

Equal to the Pillow image processors of transformers 5.24, `Gemma3ImageProcessorPil` and
`Qwen2VLImageProcessorPil`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.images.resize import pan_and_scan_crops, qwen_vl_size
from jaxinfer.images.source import ImageSource, read_rgb

if TYPE_CHECKING:
    from jaxinfer.config import VisionConfig


@dataclasses.dataclass(frozen=True)
class PreparedImage:
    """One image, ready for a tower.

    Attributes:
      pixels: float32; siglip [C, S, S]; qwen_vl [N, C * frames * P * P], the patches in the order of merge
        blocks: row by row of blocks, within a block row by row.
      grid: patches (frames, rows, columns).
      num_tokens: columns of a prompt that it stands for.
      digest: SHA-256 of what the model sees, as hex: equal digests, equal features.
    """

    pixels: np.ndarray = dataclasses.field(repr=False, compare=False)
    grid: tuple[int, int, int]
    num_tokens: int
    digest: str


def prepare_image(source: ImageSource, config: VisionConfig, *, name: str = "image") -> PreparedImage:
    """Returns the input that the tower of `config` takes of an image.

    Args:
      source: a Pillow image; a uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]; a path; a file's bytes.
      name: what an error calls the image, for example "images[1]".

    Raises:
      ImageError: it cannot be read, or is one that no model takes; see `ImageError`.
      ImportError: Pillow is missing: it is in the extra `vision`.
    """
    rgb = read_rgb(source, name)
    return _prepare_siglip(rgb, config) if config.kind == "siglip" else _prepare_qwen_vl(rgb, config, name)


def prepare_pan_and_scan(
    source: ImageSource,
    config: VisionConfig,
    *,
    name: str = "image",
    min_crop_size: int = 256,
    max_num_crops: int = 4,
    min_ratio: float = 1.2,
) -> tuple[PreparedImage, ...]:
    """Returns an image and, where it is elongated, crops along its long side, for Gemma 3.

    Args:
      min_crop_size: pixels a side; smaller crops are not made.
      max_num_crops: at most.
      min_ratio: of the long side to the short one, from which crops are made.

    Raises:
      ValueError: the tower takes images of any shape.
    """
    if config.kind != "siglip":
        raise ValueError(f"prepare_pan_and_scan(config=...) must be of kind 'siglip'; got {config.kind!r}")
    rgb = read_rgb(source, name)
    crops = pan_and_scan_crops(
        rgb, min_crop_size=min_crop_size, max_num_crops=max_num_crops, min_ratio=min_ratio
    )
    return tuple(_prepare_siglip(part, config) for part in (rgb, *crops))


def _prepare_siglip(rgb: np.ndarray, config: VisionConfig) -> PreparedImage:
    assert config.image_size is not None  # held by VisionConfig
    assert config.tokens_per_image is not None
    resized = _resized(rgb, config.image_size, config.image_size, bicubic=False)
    grid = (1, config.position_side, config.position_side)
    pixels = _normalised(np.moveaxis(resized, -1, 0), config)
    return PreparedImage(pixels, grid, config.tokens_per_image, _digest(resized, config))


def _prepare_qwen_vl(rgb: np.ndarray, config: VisionConfig, name: str) -> PreparedImage:
    assert config.min_pixels is not None  # held by VisionConfig
    assert config.max_pixels is not None
    merge, patch = config.merge_size, config.patch_size
    height, width = qwen_vl_size(
        *rgb.shape[:2],
        factor=patch * merge,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        name=name,
    )
    resized = _resized(rgb, height, width, bicubic=True)
    rows, columns = height // patch, width // patch
    blocks = resized.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    patches = _normalised(blocks.transpose(0, 3, 1, 4, 6, 2, 5), config, channel_axis=4)
    # A still image fills every frame of its patches.
    patches = np.repeat(patches[:, :, :, :, :, None], config.temporal_patch_size, axis=5)
    return PreparedImage(
        patches.reshape(rows * columns, config.patch_dim),
        (1, rows, columns),
        rows * columns // merge**2,
        _digest(resized, config),
    )


def _resized(rgb: np.ndarray, height: int, width: int, *, bicubic: bool) -> np.ndarray:
    """Pillow's filters widen with the reduction, so that a small copy is not aliased."""
    from PIL import Image

    how = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(rgb).resize((width, height), resample=how))


def _normalised(pixels: np.ndarray, config: VisionConfig, channel_axis: int = 0) -> np.ndarray:
    """Returns (pixels / 255 - mean) / std, float32, C-contiguous, by a table of the 256 values a channel."""
    scaled = (np.arange(256) * (1 / 255)).astype(np.float32)
    mean, std = (np.asarray(value, np.float32)[:, None] for value in (config.mean, config.std))
    table = (scaled - mean) / std  # [C, 256]
    out = np.empty(pixels.shape, np.float32)
    for channel in range(len(table)):
        at = (slice(None),) * channel_axis + (channel,)
        out[at] = table[channel][pixels[at]]
    return out


def _digest(resized: np.ndarray, config: VisionConfig) -> str:
    patches = (config.patch_size, config.merge_size, config.temporal_patch_size)
    facts = (config.kind, config.mean, config.std, patches, resized.shape)
    digest = hashlib.sha256(repr(facts).encode())
    digest.update(np.ascontiguousarray(resized).tobytes())
    return digest.hexdigest()
