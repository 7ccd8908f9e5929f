"""What is no image that a model can take is refused by name, and nothing else is."""

import io
import re
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxinfer.config import VisionConfig
from jaxinfer.images import ImageError, prepare_image
from jaxinfer.images.source import MAX_PIXELS, read_rgb
from tests.oracles.tiny_images import draw

QWEN_VL = VisionConfig("qwen_vl", 32, 48, 2, 2, 8, 2, 36, 64, rope_theta=1e4, min_pixels=256, max_pixels=4096)
PHOTO = Image.fromarray(draw(40, 30))


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def animated(kind):
    frames = [Image.fromarray(draw(20, 20 + index)).resize((20, 20)) for index in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def bomb(width, height):
    """The head of a PNG that says it is large."""
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT" + bytes(9)]
    packed = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


PNG, JPEG = encoded(PHOTO), encoded(PHOTO, "JPEG")
BROKEN_PNG = PNG[:60] + bytes(40) + PNG[100:]
FILES = (
    "nothing",
    "magic number",
    "text",
    "half a PNG",
    "broken PNG",
    "part of a JPEG",
    "GIF",
    "WebP",
    "animated PNG",
    "TIFF pages",
    "MP4",
    "Matroska",
    "AVI",
    "large",
    "huge",
    "no rows",
)
MP4 = b"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom" + bytes(100)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "images[1]: is empty (0 bytes)"),
        (b"GIF89a", "images[1]: is not an image that Pillow"),
        (b"hello, world", "images[1]: is not an image that Pillow"),
        (PNG[: len(PNG) // 2], "images[1]: is damaged: "),
        (BROKEN_PNG, "images[1]: is damaged: "),
        (JPEG[: len(JPEG) * 3 // 4], "images[1]: is damaged: "),
        (animated("GIF"), "images[1]: holds 3 frames or pages; pass one of them"),
        (animated("WEBP"), "images[1]: holds 3 frames or pages; pass one of them"),
        (animated("PNG"), "images[1]: holds 3 frames or pages; pass one of them"),
        (animated("TIFF"), "images[1]: holds 3 frames or pages; pass one of them"),
        (MP4, "images[1]: is a video; pass its frames as images"),
        (b"\x1aE\xdf\xa3" + bytes(50), "images[1]: is a video"),
        (b"RIFF\x00\x00\x00\x00AVI LIST", "images[1]: is a video"),
        (bomb(10_000, 10_000), f"images[1]: has more than {MAX_PIXELS:,} pixels; scale it down first"),
        (bomb(60_000, 60_000), f"images[1]: has more than {MAX_PIXELS:,} pixels; scale it down first"),
        (bomb(0, 9), "images[1]: is "),
    ],
    ids=FILES,
)
def test_a_file_that_is_no_still_image_is_named_with_what_is_wrong(data, message):
    with pytest.raises(ImageError, match="^" + re.escape(message)) as caught:
        prepare_image(data, QWEN_VL, name="images[1]")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((4, 8, 8, 3), np.uint8), r"an array \[4, 8, 8, 3\] is a video or several images"),
        (np.zeros((8, 8, 3), np.float32), r"must be uint8 .*; got float32 \[8, 8, 3\]"),
        (np.zeros((3, 8, 8), np.uint8), r"must be uint8 .*; got uint8 \[3, 8, 8\]"),
        (np.zeros(8, np.uint8), r"must be uint8 .*; got uint8 \[8\]"),
        (np.zeros((0, 8, 3), np.uint8), "is empty: 8 x 0 pixels"),
        (Image.new("RGB", (0, 5)), "is empty: 0 x 5 pixels"),
        (Image.new("I;16", (5, 5)), "has Pillow mode 'I;16', more than 8 bits a channel"),
        (Image.new("F", (5, 5)), "has Pillow mode 'F', more than 8 bits a channel"),
        (None, "must be a Pillow image, .*; got NoneType"),
        ([1, 2], "must be a Pillow image, .*; got list"),
        ("https://example.org/a.png", "https://example.org/a.png is a URL; download it"),
        ("data:image/png;base64,AAAA", "is a URL; download it and pass a path or its bytes"),
        ("clip.MP4", "clip.MP4 is a video; pass its frames as images"),
        ("nowhere/a.png", r"^image \(nowhere/a.png\): cannot be read: No such file or directory"),
        (np.zeros((2, 500, 3), np.uint8), "500 x 2 pixels: one side is more than 200 times the other"),
    ],
)
def test_a_source_that_is_no_image_is_named_with_what_is_wrong(source, message):
    with pytest.raises(ImageError, match=message) as caught:
        prepare_image(source, QWEN_VL)
    assert str(caught.value).startswith("image")


def test_a_directory_is_no_image(tmp_path):
    with pytest.raises(ImageError, match=r"cannot be read: Is a directory"):
        prepare_image(tmp_path, QWEN_VL)


def test_a_damaged_file_is_named_with_its_path(tmp_path):
    path = tmp_path / "cut.png"
    path.write_bytes(PNG[:200])
    with pytest.raises(ImageError, match=rf"^images\[0\] \({re.escape(str(path))}\): is damaged: "):
        prepare_image(path, QWEN_VL, name="images[0]")


def test_a_frame_of_an_animation_can_be_passed():
    film = Image.open(io.BytesIO(animated("GIF")))
    with pytest.raises(ImageError, match="holds 3 frames"):
        prepare_image(film, QWEN_VL)
    film.seek(1)
    assert prepare_image(film.copy(), QWEN_VL).num_tokens > 0


def test_a_photo_with_a_second_picture_is_one_image():
    two = [Image.fromarray(draw(20, 30)), Image.fromarray(draw(20, 31)).resize((30, 20))]
    data = encoded(two[0], "MPO", save_all=True, append_images=two[1:])
    np.testing.assert_array_equal(read_rgb(data, "image"), read_rgb(encoded(two[0], "JPEG"), "image"))


def test_the_callers_image_and_warning_filters_stay_as_they_are():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(encoded(PHOTO, exif=exif.tobytes())))
    prepare_image(image, QWEN_VL)
    assert image.size == (30, 40)
    array = draw(20, 20)
    before = array.copy()
    prepare_image(array, QWEN_VL)
    np.testing.assert_array_equal(array, before)


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"the extra `vision`: pip install 'jaxinfer\[vision\]'"):
        prepare_image(b"anything", QWEN_VL)
