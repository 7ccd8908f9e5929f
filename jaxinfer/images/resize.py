"""The size an image is brought to, and the crops of pan and scan."""

from __future__ import annotations

import math

import numpy as np

from jaxinfer.images.errors import ImageError

_MAX_ASPECT = 200


def qwen_vl_size(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, name: str = "image"
) -> tuple[int, int]:
    """Returns (height, width) in pixels: multiples of `factor`, between the bounds, the shape roughly kept.

    Each side is rounded to its nearest multiple (ties to even). Where the product is above `max_pixels` both
    sides are scaled down and rounded down (at least one `factor` stays), where it is below `min_pixels`
    scaled up and rounded up.

    Raises:
      ImageError: one side is more than 200 times the other.
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT:
        raise ImageError(
            f"{name}: {width} x {height} pixels: one side is more than {_MAX_ASPECT} times the other; crop it"
        )
    high, wide = (round(side / factor) * factor for side in (height, width))
    if high * wide > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        high, wide = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif high * wide < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        high, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return high, wide


def pan_and_scan_crops(
    rgb: np.ndarray, *, min_crop_size: int, max_num_crops: int, min_ratio: float
) -> list[np.ndarray]:
    """Returns the crops of an elongated image along its long side; none where it is not worth it.

    As many as the sides' ratio, rounded, but at least two, at most `max_num_crops`, and none when a crop
    would be smaller than `min_crop_size` pixels a side.
    """
    short, long = sorted(rgb.shape[:2])
    if long / short < min_ratio:
        return []
    count = min(long // min_crop_size, math.floor(long / short + 0.5))
    count = min(max(2, count), max_num_crops)
    size = math.ceil(long / count)
    if min(size, short) < min_crop_size:
        return []
    is_wide = rgb.shape[1] >= rgb.shape[0]
    cuts = [slice(size * index, size * (index + 1)) for index in range(count)]
    return [rgb[:, cut] if is_wide else rgb[cut] for cut in cuts]
