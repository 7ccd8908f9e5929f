"""Towers give the features that transformers gives, each image alone; what does not fit is named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.models.vision.encode import _encode_qwen_vl, padded_patches
from tests.models.tiny_models import read_config, tiny_tower
from tests.oracles.tiny_checkpoints import IMAGE_ORACLES, load_oracle

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def images_of(oracle):
    """(pixels, grid) of each image of an oracle's prompt."""
    pixels, grids = oracle.inputs["pixel_values"], oracle.inputs.get("image_grid_thw")
    if grids is None:
        return [(image, None) for image in pixels]
    ends = np.cumsum(grids.prod(1))
    grids = [tuple(grid.tolist()) for grid in grids]
    return list(zip(np.split(pixels, ends[:-1]), grids, strict=True))


def encode(name, oracle):
    config = read_config(name).vision
    parts = [
        ji.encode_image(tiny_tower(name), pixels, config=config, grid=grid)
        for pixels, grid in images_of(oracle)
    ]
    embeddings = np.concatenate([part.embeddings for part in parts])
    if parts[0].deepstack is None:
        return embeddings, None
    return embeddings, np.concatenate([part.deepstack for part in parts], axis=1)


@pytest.mark.parametrize("edges", [False, True], ids=["prompt", "edges"])
@pytest.mark.parametrize("name", IMAGE_ORACLES)
def test_features_are_those_of_transformers(name, edges):
    oracle = load_oracle(name, edges=edges)
    embeddings, deepstack = encode(name, oracle)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, oracle.features, rtol=0, atol=TOLERANCE)
    assert (deepstack is None) == (oracle.deepstack is None) == (name != "qwen3_vl")
    if deepstack is not None:
        np.testing.assert_allclose(deepstack, oracle.deepstack, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_bfloat16_weights_stay_close(name):
    oracle, config = load_oracle(name), read_config(name).vision
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, tiny_tower(name))
    parts = [ji.encode_image(low, pixels, config=config, grid=grid) for pixels, grid in images_of(oracle)]
    error = np.concatenate([part.embeddings for part in parts]) - oracle.features
    assert np.abs(error).mean() < 0.02 * oracle.features.std()


def test_frames_of_a_grid_do_not_see_one_another():
    config, tower = read_config("qwen3_vl").vision, tiny_tower("qwen3_vl")
    (first, grid), (second, _) = images_of(load_oracle("qwen3_vl"))
    both = ji.encode_image(tower, np.concatenate([first, second]), config=config, grid=(2, *grid[1:]))
    alone = ji.encode_image(tower, first, config=config, grid=grid)
    np.testing.assert_allclose(both.embeddings[:6], alone.embeddings, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(both.deepstack[:, :6], alone.deepstack, rtol=0, atol=TOLERANCE)


def test_padding_holds_a_quarter_at_most_and_shapes_of_a_size_share_a_program():
    config, tower = read_config("qwen3_vl").vision, tiny_tower("qwen3_vl")
    sizes = [padded_patches(4 * blocks, config) // 4 for blocks in range(1, 66)]
    assert sorted(set(sizes)) == [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80]
    assert all(blocks <= size < 1.25 * blocks for blocks, size in enumerate(sizes, 1))
    before = _encode_qwen_vl._cache_size()
    for rows, columns in ((18, 2), (2, 18), (6, 6), (4, 10), (10, 4)):  # 9 and 10 blocks
        pixels = np.zeros((rows * columns, config.patch_dim), np.float32)
        ji.encode_image(tower, pixels, config=config, grid=(1, rows, columns))
    assert _encode_qwen_vl._cache_size() == before + 1


@pytest.mark.parametrize(
    ("name", "shape", "grid", "message"),
    [
        ("gemma3", (3, 56, 56), None, r"must be float32 \[3, 112, 112\]; got \[3, 56, 56\]"),
        ("qwen3_vl", (24, 384), None, "a qwen_vl tower needs it"),
        ("qwen3_vl", (24, 384), (1, 3, 8), "rows and columns multiples of 2"),
        ("qwen3_vl", (24, 384), (0, 4, 6), "rows and columns multiples of 2"),
        ("qwen3_vl", (24, 384), (1, 4, 4), r"must be float32 \[16, 384\] for grid \(1, 4, 4\)"),
        ("qwen3_vl", (24, 192), (1, 4, 6), r"must be float32 \[24, 384\]"),
    ],
)
def test_pixels_that_do_not_fit_are_refused(name, shape, grid, message):
    config = read_config(name).vision
    with pytest.raises(ValueError, match=message):
        ji.encode_image(tiny_tower(name), np.zeros(shape, np.float32), config=config, grid=grid)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(kind="clip"), "kind=...\\) must be one of"),
        (dict(num_heads=3), "must be a multiple of num_heads=3"),
        (dict(num_positions=35), "must be a square number"),
        (dict(mean=(0.5,)), "must be 3 numbers each"),
        (dict(std=(0.5, 0.0, 0.5)), "no std 0"),
        (dict(deepstack_layers=(3,)), r"must be layers of 0\.\.2"),
        (dict(min_pixels=9, max_pixels=8), "0 < min_pixels <= max_pixels"),
        (dict(rope_theta=None), "needs rope_theta"),
        (dict(num_heads=16), "multiple of 4"),
        (dict(patch_size=0), "patch_size=...\\) must be an int of at least 1; got 0"),
    ],
)
def test_a_config_that_no_tower_has_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(read_config("qwen3_vl").vision, **changes)


def test_a_siglip_config_that_does_not_pool_evenly_is_refused():
    config = read_config("gemma3").vision
    for changes in (dict(image_size=None), dict(image_size=126), dict(merge_size=3)):
        with pytest.raises(ValueError, match="needs image_size // patch_size = 8 patches a side"):
            dataclasses.replace(config, **changes)
