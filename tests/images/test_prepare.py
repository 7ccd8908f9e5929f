"""Prepared images equal what the image processors of transformers make of the same image."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from jaxinfer.config import VisionConfig
from jaxinfer.images import prepare_image, prepare_pan_and_scan, qwen_vl_size
from tests.oracles import tiny_images
from tests.oracles.tiny_images import NAMES, PAN_AND_SCAN, QWEN, SIGLIP_SIZE, SIZES, draw, picture

# Equal with the Pillow that made them (13.0). One step of 255 is 8e-3 after normalisation: a Pillow that
# rounds a resized pixel otherwise would show.
TOLERANCE = 1e-6

TOWER = dict(embed_dim=32, mlp_dim=48, num_layers=2, num_heads=2, out_dim=64)
SIGLIP = VisionConfig("siglip", **TOWER, patch_size=7, merge_size=2, num_positions=64, image_size=SIGLIP_SIZE)
QWEN_VL = VisionConfig("qwen_vl", **TOWER, **QWEN, num_positions=36, rope_theta=1e4)


@pytest.fixture(scope="module")
def expected():
    return tiny_images.load()


@pytest.mark.parametrize("name", NAMES)
def test_siglip_pixels_are_those_of_transformers(name, expected):
    prepared = prepare_image(picture(name), SIGLIP)
    assert prepared.pixels.dtype == np.float32
    assert prepared.grid == (1, 8, 8)
    assert prepared.num_tokens == SIGLIP.tokens_per_image == 16
    np.testing.assert_allclose(prepared.pixels, expected[f"siglip.{name}"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_qwen_patches_are_those_of_transformers(name, expected):
    prepared = prepare_image(picture(name), QWEN_VL)
    patches = expected[f"qwen.{name}"]
    assert prepared.grid == tuple(expected[f"qwen.{name}.grid"])
    assert prepared.num_tokens == len(patches) // 4
    assert prepared.pixels.dtype == np.float32
    assert prepared.pixels.flags.c_contiguous
    frames = prepared.pixels.reshape(len(patches), 3, 2, 8, 8)
    for frame in (0, 1):  # a still image fills both
        np.testing.assert_allclose(frames[:, :, frame], patches, rtol=0, atol=TOLERANCE)


def test_sizes_are_those_of_transformers(expected):
    bounds = dict(factor=32, min_pixels=65_536, max_pixels=16_777_216)
    for height, width, *resized in expected["sizes"].tolist():
        assert list(qwen_vl_size(height, width, **bounds)) == resized
        assert resized[0] % 32 == resized[1] % 32 == 0


@pytest.mark.parametrize(("name", "crops"), [("photo", 2), ("wide", 3), ("tall", 3), ("small", 0)])
def test_pan_and_scan_crops_are_those_of_transformers(name, crops, expected):
    prepared = prepare_pan_and_scan(picture(name), SIGLIP, **PAN_AND_SCAN)
    assert len(prepared) == 1 + crops == len(expected[f"crops.{name}"])
    for one, pixels in zip(prepared, expected[f"crops.{name}"], strict=True):
        np.testing.assert_allclose(one.pixels, pixels, rtol=0, atol=TOLERANCE)


def test_pan_and_scan_is_for_towers_of_one_size():
    with pytest.raises(ValueError, match="must be of kind 'siglip'; got 'qwen_vl'"):
        prepare_pan_and_scan(picture("photo"), QWEN_VL)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_every_kind_of_source_gives_the_same(tmp_path):
    image = picture("photo")
    path = tmp_path / "photo.png"
    path.write_bytes(encoded(image))
    sources = [image, np.asarray(image), path, str(path), path.read_bytes()]
    first, *others = [prepare_image(source, QWEN_VL) for source in sources]
    for other in others:
        assert other == first  # the digest too
        np.testing.assert_array_equal(other.pixels, first.pixels)
    gray = draw(*SIZES["photo"])[..., 0]
    assert prepare_image(gray, QWEN_VL) == prepare_image(gray[..., None], QWEN_VL)
    assert prepare_image(gray, QWEN_VL) == prepare_image(Image.fromarray(gray), QWEN_VL)


@pytest.mark.parametrize("kind", ["path", "bytes", "image"])
def test_the_orientation_of_a_photo_is_applied(kind, tmp_path):
    upright = Image.fromarray(draw(40, 64))
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its left side: turn clockwise
    data = encoded(upright.rotate(90, expand=True), exif=exif.tobytes())
    (tmp_path / "photo.png").write_bytes(data)
    sources = {"path": tmp_path / "photo.png", "bytes": data, "image": Image.open(io.BytesIO(data))}
    assert prepare_image(sources[kind], QWEN_VL) == prepare_image(upright, QWEN_VL)


def test_transparent_is_white_and_not_what_lies_below():
    black = np.zeros((56, 56, 4), np.uint8)
    pixels = prepare_image(black, SIGLIP).pixels
    np.testing.assert_array_equal(pixels, np.ones_like(pixels))
    np.testing.assert_array_equal(prepare_image(Image.fromarray(black), SIGLIP).pixels, pixels)


def test_a_digest_tells_images_of_one_size_apart_and_covers_how_they_were_prepared():
    image = draw(56, 56)
    other = image.copy()
    other[55, 55, 2] ^= 1
    digests = [prepare_image(source, SIGLIP).digest for source in (image, image.copy(), other)]
    assert digests[0] == digests[1] != digests[2]
    assert all(len(digest) == 64 for digest in digests)
    configs = [
        SIGLIP,
        dataclasses.replace(SIGLIP, mean=(0.4, 0.5, 0.5)),
        dataclasses.replace(SIGLIP, std=(0.5, 0.5, 0.25)),
        QWEN_VL,
        dataclasses.replace(QWEN_VL, temporal_patch_size=1),
        dataclasses.replace(QWEN_VL, patch_size=4, merge_size=4),
    ]
    assert len({prepare_image(image, config).digest for config in configs}) == len(configs)


def test_means_and_deviations_differ_by_channel():
    config = dataclasses.replace(SIGLIP, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))
    pixels = prepare_image(np.full((9, 9, 3), 51, np.uint8), config).pixels  # 0.2 everywhere
    np.testing.assert_allclose(pixels[:, 0, 0], [0.2, 0.0, -0.05], rtol=0, atol=1e-6)
