"""Writes `images.npz`: what the Pillow image processors of transformers give; needs the `peers` extra.

python -m tests.oracles.make_image_oracles
"""

from __future__ import annotations

import numpy as np
import transformers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from tests.oracles.tiny_images import NAMES, PAN_AND_SCAN, PATH, QWEN, SIGLIP_SIZE, picture

HALF = [0.5, 0.5, 0.5]


def siglip_pixels(name: str, **options) -> np.ndarray:
    processor = Gemma3ImageProcessorPil(size={"height": SIGLIP_SIZE, "width": SIGLIP_SIZE}, **options)
    return np.asarray(processor([picture(name)], return_tensors="np")["pixel_values"], np.float32)


def qwen_patches(name: str) -> tuple[np.ndarray, np.ndarray]:
    processor = Qwen2VLImageProcessorPil(image_mean=HALF, image_std=HALF, **QWEN)
    made = processor([picture(name)], return_tensors="np")
    side = QWEN["patch_size"]
    patches = made["pixel_values"].reshape(-1, 3, QWEN["temporal_patch_size"], side, side)
    assert (patches == patches[:, :, :1]).all()
    return patches[:, :, 0], made["image_grid_thw"][0]


def sizes() -> np.ndarray:
    random = np.random.RandomState(5)
    given = [(1, 1), (1, 200), (31, 33), (16, 48), (4096, 4096), (5000, 300), (64, 12800), (80, 16)]
    given += [tuple(np.exp(random.uniform(0, 9, 2)).astype(int) + 1) for _ in range(60)]
    given = [(int(h), int(w)) for h, w in given if max(h, w) / min(h, w) <= 200]
    bounds = dict(factor=32, min_pixels=65_536, max_pixels=16_777_216)
    return np.array([(*size, *smart_resize(*size, **bounds)) for size in given], np.int64)


def main() -> None:
    arrays = {"sizes": sizes()}
    for name in NAMES:
        arrays[f"siglip.{name}"] = siglip_pixels(name)[0]
        arrays[f"qwen.{name}"], arrays[f"qwen.{name}.grid"] = qwen_patches(name)
    options = {f"pan_and_scan_{key}": value for key, value in PAN_AND_SCAN.items()}
    options["pan_and_scan_min_ratio_to_activate"] = options.pop("pan_and_scan_min_ratio")
    for name in ("photo", "wide", "tall", "small"):
        arrays[f"crops.{name}"] = siglip_pixels(name, do_pan_and_scan=True, **options)
    np.savez_compressed(PATH, **arrays)
    print(f"transformers {transformers.__version__}: {PATH}, {PATH.stat().st_size / 1024:.0f} KiB")
    for key, value in arrays.items():
        print(f"  {key} {value.dtype} {value.shape}")


if __name__ == "__main__":
    main()
