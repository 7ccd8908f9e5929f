"""Image towers as pure functions: pixels to features that stand in for token embeddings.

SigLIP with Gemma 3's projector, and the tower of Qwen3-VL, with deepstack features, and of Qwen3.5, without.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxinfer.config import VisionConfig
from jaxinfer.models.vision.params import ImageFeatures, MergerParams, SiglipProjectorParams, VisionParams
from jaxinfer.nn import affine, encoder_block, normed
from jaxinfer.ops import linear, rms_norm

_MERGER_EPS = 1e-6


def encode_image(
    params: VisionParams,
    pixels: ArrayLike,
    *,
    config: VisionConfig,
    grid: tuple[int, int, int] | None = None,
) -> ImageFeatures:
    """Returns the features of one image.

    Args:
      pixels: as `PreparedImage.pixels`: siglip [C, S, S]; qwen_vl [N, C * frames * P * P].
      grid: as `PreparedImage.grid`; qwen_vl needs it.

    A siglip tower compiles once. A qwen_vl tower compiles once for each size in a list with four steps an
    octave (patches are padded up to it); images of other shapes but the same size share the program.

    Raises:
      ValueError: shapes that do not fit the config or one another.
    """
    pixels = jnp.asarray(pixels, jnp.float32)
    if config.kind == "siglip":
        _check_siglip(pixels, config)
        return _encode_siglip(params, pixels, config=config)
    frames, rows, columns = _checked_grid(pixels, grid, config)
    count = rows * columns
    padded = padded_patches(count, config)
    # Frames do not see one another: each is an image of its own.
    parts = [
        _encode_qwen_vl(
            params,
            jnp.pad(pixels[frame * count : (frame + 1) * count], ((0, padded - count), (0, 0))),
            jnp.int32(rows),
            jnp.int32(columns),
            config=config,
        )
        for frame in range(frames)
    ]
    kept = count // config.merge_size**2
    embeddings = jnp.concatenate([part.embeddings[:kept] for part in parts])
    if not config.deepstack_layers:
        return ImageFeatures(embeddings)
    stacks = [part.deepstack[:, :kept] for part in parts if part.deepstack is not None]
    return ImageFeatures(embeddings, jnp.concatenate(stacks, axis=1))


def padded_patches(count: int, config: VisionConfig) -> int:
    """Returns how many patches an image of `count` patches is padded to: the least that holds it of 4, 5, 6
    and 7 times a power of two merge blocks."""
    blocks = -(-count // config.merge_size**2)
    step = max(1, 1 << max(0, (blocks - 1).bit_length() - 3))
    return -(-blocks // step) * step * config.merge_size**2


def _check_siglip(pixels: jax.Array, config: VisionConfig) -> None:
    expected = (config.num_channels, config.image_size, config.image_size)
    if pixels.shape != expected:
        raise ValueError(
            f"encode_image(pixels=...) must be float32 {list(expected)}; got {list(pixels.shape)}; "
            "prepare_image gives such pixels"
        )


def _checked_grid(
    pixels: jax.Array, grid: tuple[int, int, int] | None, config: VisionConfig
) -> tuple[int, int, int]:
    if grid is None:
        raise ValueError("encode_image(grid=None): a qwen_vl tower needs it; pass PreparedImage.grid")
    frames, rows, columns = (int(size) for size in grid)
    if min(frames, rows, columns) < 1 or rows % config.merge_size or columns % config.merge_size:
        raise ValueError(
            f"encode_image(grid=...) must be (frames, rows, columns), rows and columns multiples of "
            f"{config.merge_size}; got {grid}"
        )
    expected = (frames * rows * columns, config.patch_dim)
    if pixels.shape != expected:
        raise ValueError(
            f"encode_image(pixels=...) must be float32 {list(expected)} for grid {grid}; got "
            f"{list(pixels.shape)}"
        )
    return frames, rows, columns


@functools.partial(jax.jit, static_argnames="config")
def _encode_siglip(params: VisionParams, pixels: jax.Array, *, config: VisionConfig) -> ImageFeatures:
    side, patch = config.position_side, config.patch_size
    # A size that is no multiple of the patch leaves a margin, which the convolution does not reach.
    pixels = pixels[:, : side * patch, : side * patch]
    patches = pixels.reshape(-1, side, patch, side, patch).transpose(1, 3, 0, 2, 4).reshape(side * side, -1)
    x = affine(params.patch, patches) + params.positions.astype(jnp.float32)
    for block in params.blocks:
        x = encoder_block(block, x, None, None, eps=config.norm_eps)
    projector = params.projector
    assert isinstance(projector, SiglipProjectorParams)  # params are of `config`
    x = normed(projector.patch_norm, x, config.norm_eps)
    pooled = side // config.merge_size
    x = x.reshape(pooled, config.merge_size, pooled, config.merge_size, -1).mean((1, 3))
    x = rms_norm(x.reshape(pooled * pooled, -1), projector.token_norm, config.norm_eps)
    return ImageFeatures(linear(x, projector.out))


@functools.partial(jax.jit, static_argnames="config")
def _encode_qwen_vl(
    params: VisionParams, patches: jax.Array, rows: jax.Array, columns: jax.Array, *, config: VisionConfig
) -> ImageFeatures:
    """Returns features of padded patches; those past rows * columns / merge^2 hold no meaning."""
    row, column = patch_places(patches.shape[0], columns, config.merge_size)
    x = affine(params.patch, patches) + _positions(params.positions, row, column, rows, columns, config)
    rope = _rope(row, column, config)
    stack = []
    for index, block in enumerate(params.blocks):
        x = encoder_block(block, x, rows * columns, rope, eps=config.norm_eps)
        if index in config.deepstack_layers:
            merger = params.deepstack[config.deepstack_layers.index(index)]
            stack.append(_merged(merger, x, config, joins_first=True))
    assert isinstance(params.projector, MergerParams)  # params are of `config`
    out = _merged(params.projector, x, config, joins_first=False)
    return ImageFeatures(out, jnp.stack(stack) if stack else None)


def patch_places(count: int, columns: jax.Array, merge: int) -> tuple[jax.Array, jax.Array]:
    """Returns (row, column) of each of `count` patches in the order of merge blocks, int32 [N] each."""
    index = lax.iota(jnp.int32, count)
    block, inside = index // (merge * merge), index % (merge * merge)
    blocks_a_row = columns // merge
    row = block // blocks_a_row * merge + inside // merge
    return row, block % blocks_a_row * merge + inside % merge


def _positions(
    table: jax.Array,
    row: jax.Array,
    column: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
    config: VisionConfig,
) -> jax.Array:
    """Returns the learned positions, float32 [N, E]: the square table stretched over the image, its corners
    on the image's, and read bilinearly."""
    side = config.position_side

    def taps(place: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        at = place.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1).astype(jnp.float32)
        low = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, side - 1)
        return low, jnp.minimum(low + 1, side - 1), (at - low)[:, None]

    top, bottom, down = taps(row, rows)
    left, right, across = taps(column, columns)
    table = table.astype(jnp.float32)
    upper = (1 - across) * table[top * side + left] + across * table[top * side + right]
    lower = (1 - across) * table[bottom * side + left] + across * table[bottom * side + right]
    return (1 - down) * upper + down * lower


def _rope(row: jax.Array, column: jax.Array, config: VisionConfig) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin), [N, H / 2] each: the first half of the angles turns with the row, the second with
    the column."""
    assert config.rope_theta is not None  # held by VisionConfig
    half = config.head_dim // 2
    freqs = config.rope_theta ** (-jnp.arange(0, half, 2, dtype=jnp.float32) / half)
    places = jnp.stack([row, column], axis=1).astype(jnp.float32)
    angles = (places[:, :, None] * freqs).reshape(row.shape[0], half)
    return jnp.cos(angles), jnp.sin(angles)


def _merged(params: MergerParams, x: jax.Array, config: VisionConfig, *, joins_first: bool) -> jax.Array:
    """Returns a feature for each merge block, float32 [N / m^2, D]; `joins_first`: the norm comes after."""
    size = config.merge_size**2 * config.embed_dim
    x = x.reshape(-1, size) if joins_first else x
    x = normed(params.norm, x, _MERGER_EPS).reshape(-1, size)
    return affine(params.down, jax.nn.gelu(affine(params.up, x), approximate=False))
