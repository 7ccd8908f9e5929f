"""From a path, bytes, an array or a Pillow image to upright 8-bit RGB pixels.

What a model cannot take is refused by name: nothing is cut, scaled down or guessed. Transparency is laid over
white and the EXIF orientation is applied, whatever the source.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias, Union

import numpy as np

from jaxinfer.images.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource: TypeAlias = Union["Image", np.ndarray, str, "os.PathLike[str]", bytes]

# Decoded, 268 MB of RGB. Pillow warns from about as many on.
MAX_PIXELS = 89_478_485

# Formats whose further pictures belong to one photo (a phone's depth map, the second eye of a stereo camera).
_ONE_PHOTO = ("MPO",)

_VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg", ".wmv", ".flv")
_MATROSKA = b"\x1aE\xdf\xa3"
_IMAGE_BRANDS = (
    b"avif",
    b"avis",
    b"heic",
    b"heix",
    b"heif",
    b"mif1",
    b"msf1",
)  # of ISO media that is no video
_HEAD_BYTES = 16


def read_rgb(source: ImageSource, name: str) -> np.ndarray:
    """Returns the pixels of `source`, uint8 [H, W, 3], sRGB values as they are stored.

    Args:
      source: a Pillow image; a uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]; a path; a file's
        bytes.
      name: what an error calls the image.

    Raises:
      ImageError: it is not an image, damaged, empty, larger than `MAX_PIXELS`, animated, or a video; or has
        more than 8 bits a channel.
      ImportError: Pillow is missing.
    """
    if isinstance(source, np.ndarray):
        return _read_array(source, name)
    if isinstance(source, bytes | bytearray | memoryview):
        return _read_file(io.BytesIO(source), bytes(source[:_HEAD_BYTES]), name)
    if isinstance(source, str | os.PathLike):
        return _read_path(os.fsdecode(source), name)
    if not isinstance(source, _pillow().Image):
        raise ImageError(
            f"{name}: must be a Pillow image, a uint8 array [H, W, C], a path or a file's bytes; got "
            f"{type(source).__name__}"
        )
    return _read_pillow(source, name)


def image_file(source: ImageSource, name: str) -> bytes:
    """Returns `source` as a file's bytes, to keep: of a path or bytes what they hold, else a PNG of the same
    pixels.

    Raises:
      ImageError: as `read_rgb`, but for what only decoding shows.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str | os.PathLike):
        return _file_bytes(os.fsdecode(source), name)
    file = io.BytesIO()
    _pillow().fromarray(read_rgb(source, name)).save(file, "PNG")
    return file.getvalue()


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "reading images needs Pillow, the extra `vision`: pip install 'jaxinfer[vision]'"
        ) from error
    return Image


def _read_array(array: np.ndarray, name: str) -> np.ndarray:
    if array.ndim == 4:
        raise ImageError(
            f"{name}: an array {list(array.shape)} is a video or several images; pass one [H, W, C] at a time"
        )
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise ImageError(
            f"{name}: must be uint8 [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] with values 0 to 255; got "
            f"{array.dtype} {list(array.shape)}"
        )
    _check_size(array.shape[1], array.shape[0], name)
    array = array.reshape(*array.shape[:2], channels)
    if channels == 1:
        return np.repeat(array, 3, axis=2)
    if channels == 4:
        alpha = array[..., 3:] / 255
        return np.round(alpha * array[..., :3] + (1 - alpha) * 255).astype(np.uint8)
    return np.ascontiguousarray(array)


def _read_path(path: str, name: str) -> np.ndarray:
    data = _file_bytes(path, name)
    return _read_file(io.BytesIO(data), data[:_HEAD_BYTES], f"{name} ({path})")


def _file_bytes(path: str, name: str) -> bytes:
    if path.startswith(("http://", "https://", "data:")):
        raise ImageError(f"{name}: {path[:60]} is a URL; download it and pass a path or its bytes")
    if path.lower().endswith(_VIDEO_SUFFIXES):
        raise ImageError(f"{name}: {path} is a video; pass its frames as images")
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"{name} ({path}): cannot be read: {reason}") from error


def _read_file(file: io.BytesIO, head: bytes, name: str) -> np.ndarray:
    pillow = _pillow()
    if not head:
        raise ImageError(f"{name}: is empty (0 bytes)")
    if _is_video(head):
        raise ImageError(f"{name}: is a video; pass its frames as images")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            image = pillow.open(file)
    except (pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
        raise ImageError(f"{name}: has more than {MAX_PIXELS:,} pixels; scale it down first") from error
    except Exception as error:  # a damaged header can raise anything
        raise ImageError(f"{name}: is not an image that Pillow {pillow.__version__} can read") from error
    with image:
        return _read_pillow(image, name)


def _is_video(head: bytes) -> bool:
    iso_media = head[4:8] == b"ftyp" and head[8:12] not in _IMAGE_BRANDS
    return iso_media or head[:4] == _MATROSKA or (head[:4] == b"RIFF" and head[8:12] == b"AVI ")


def _read_pillow(image: Image, name: str) -> np.ndarray:
    from PIL import ImageOps

    pillow = _pillow()
    _check_size(*image.size, name)
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(
            f"{name}: has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}; scale it down "
            "first"
        )
    try:
        frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format not in _ONE_PHOTO:
            raise ImageError(
                f"{name}: holds {frames} frames or pages; pass one of them: image.seek(0), image.copy()"
            )
        image = ImageOps.exif_transpose(image)
        if image.mode == "F" or image.mode.startswith("I"):
            raise ImageError(
                f"{name}: has Pillow mode {image.mode!r}, more than 8 bits a channel; scale it to 0..255 "
                "first"
            )
        if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
            image = image.convert("RGBA")
            white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
            image = pillow.alpha_composite(white, image)
        return np.array(image.convert("RGB"))
    except ImageError:
        raise
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise ImageError(f"{name}: is damaged: {_one_line(error)}") from error


def _check_size(width: int, height: int, name: str) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"{name}: is empty: {width} x {height} pixels")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
