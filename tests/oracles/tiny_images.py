"""Images drawn by code, and what the image processors of transformers make of them.

`make_image_oracles.py` writes `images.npz`; this module needs neither it nor the packages
under test.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

PATH = Path(__file__).parent / "images.npz"

# What the processors were told; the rest is as published: mean and std 0.5.
SIGLIP_SIZE = 56
QWEN = dict(patch_size=8, merge_size=2, temporal_patch_size=2, min_pixels=1536, max_pixels=5120)
PAN_AND_SCAN = dict(min_crop_size=24, max_num_crops=3, min_ratio=1.2)

# Height, width. Between QWEN's bounds, above, below; too flat for both sides to stay multiples.
SIZES = {"photo": (50, 70), "large": (150, 97), "small": (13, 17), "wide": (30, 151), "tall": (120, 41)}
MODES = ("L", "RGBA", "LA", "P")  # of "photo", beside RGB
ARRAYS = ("gray", "rgba")  # of "photo", as arrays


def draw(height: int, width: int) -> np.ndarray:
    """uint8 [H, W, 3]: waves, edges and a little noise: what a resize filter gets wrong shows."""
    row, column = np.mgrid[:height, :width]
    red = 128 + 127 * np.sin(row / 3.1 + column / 7.7)
    green = 255 * ((row // 5 + column // 9) % 2)
    blue = 255 * column / max(width - 1, 1)
    noise = np.random.RandomState(height * 1000 + width).randint(-12, 13, (height, width, 3))
    return np.clip(np.stack([red, green, blue], -1) + noise, 0, 255).astype(np.uint8)


def alpha(height: int, width: int) -> np.ndarray:
    """uint8 [H, W]: clear at the top, opaque at the bottom."""
    return np.broadcast_to(
        (255 * np.arange(height) // (height - 1)).astype(np.uint8)[:, None], (height, width)
    )


def picture(name: str) -> Image.Image | np.ndarray:
    """The image `name`: a key of `SIZES`, one of `MODES` as a Pillow image, or one of `ARRAYS`."""
    if name in SIZES:
        return Image.fromarray(draw(*SIZES[name]))
    rgb = draw(*SIZES["photo"])
    rgba = np.dstack([rgb, alpha(*SIZES["photo"])])
    if name in ARRAYS:
        return {"gray": rgb[..., :1], "rgba": rgba}[name]
    if name == "P":  # a palette with one transparent colour
        image = Image.fromarray(rgb).quantize(16)
        image.info["transparency"] = 3
        return image
    return Image.fromarray(rgba).convert(name)


NAMES = (*SIZES, *MODES, *ARRAYS)


def load() -> dict[str, np.ndarray]:
    """Arrays "siglip.NAME" float32 [C, S, S], "qwen.NAME" float32 [N, C, P, P] (every frame the same) with
    "qwen.NAME.grid", "crops.NAME" float32 [1 + crops, C, S, S] of pan and scan, and "sizes" int64 [n, 4]:
    (height, width) to the (height, width) of Qwen3-VL's published bounds."""
    with np.load(PATH) as stored:
        return dict(stored)
