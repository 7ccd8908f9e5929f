"""A tower's config and weights are read under every name that checkpoints use; what does not fit is named."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer.models import WeightsError, assemble_vision, family_of, vision_param_shapes
from jaxinfer.testing import random_vision_params, tiny_config
from tests.models.test_assembly import renamed
from tests.models.test_config_reading import read
from tests.models.tiny_models import DictTensors, read_config, tiny_tower
from tests.oracles.tiny_checkpoints import load_oracle, tiny_weights


def assemble(name, weights):
    raw = load_oracle(name).config
    return assemble_vision(read_config(name), family_of(raw), DictTensors(weights))


def test_towers_are_read_with_their_sizes():
    gemma, qwen = read_config("gemma3").vision, read_config("qwen3_vl").vision
    assert (gemma.kind, gemma.num_layers, gemma.image_size, gemma.merge_size) == ("siglip", 2, 112, 2)
    assert (gemma.tokens_per_image, gemma.begin_token_id, gemma.end_token_id) == (16, 297, 298)
    assert (qwen.kind, qwen.num_layers, qwen.patch_size, qwen.merge_size) == ("qwen_vl", 3, 8, 2)
    assert (qwen.tokens_per_image, qwen.begin_token_id, qwen.end_token_id) == (None, 253, 254)
    assert (qwen.deepstack_layers, qwen.rope_theta) == ((0, 1), 10_000.0)
    assert dataclasses.replace(qwen, deepstack_layers=()) == read_config("qwen3_5").vision
    assert read_config("gemma3_text").vision is None


def test_gemma_takes_256_tokens_an_image_where_the_config_names_none():
    raw = load_oracle("gemma3").config
    vision = raw["vision_config"] | {"image_size": 896}
    found = read("gemma3", vision_config=vision, mm_tokens_per_image=...).vision
    assert (found.tokens_per_image, found.merge_size, found.num_positions) == (256, 4, 4096)


def test_a_preprocessor_config_gives_bounds_means_and_deviations():
    published = {"size": {"shortest_edge": 1024, "longest_edge": 9216}, "image_mean": [0.1, 0.2, 0.3]}
    vision = read("qwen3_vl", preprocessor_config=published).vision
    assert (vision.min_pixels, vision.max_pixels, vision.mean) == (1024, 9216, (0.1, 0.2, 0.3))
    older = {"min_pixels": 2048, "max_pixels": 4096, "image_std": [0.5, 0.25, 0.5]}
    vision = read("qwen3_5", preprocessor_config=older).vision
    assert (vision.min_pixels, vision.max_pixels, vision.std) == (2048, 4096, (0.5, 0.25, 0.5))
    default = read("qwen3_vl").vision
    assert (default.min_pixels, default.max_pixels) == (65_536, 16_777_216)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", dict(vision_config=...), "lacks 'vision_config'"),
        ("qwen3_vl", dict(vision_config=...), "lacks 'vision_config'"),
        ("gemma3", dict(vision_config=[]), "vision_config must be an object"),
        ("gemma3", dict(mm_tokens_per_image=15), "mm_tokens_per_image=15 must be a square"),
        ("gemma3", dict(mm_tokens_per_image=25), "whose side divides 8 = image_size 112 // patch_size 14"),
        ("gemma3", dict(mm_tokens_per_image="16"), "mm_tokens_per_image must be an integer"),
        ("gemma3", dict(preprocessor_config={"size": {"height": 224}}), "does not fit image_size=112"),
        ("gemma3", dict(preprocessor_config={"resample": 3}), "resample=3 is not supported; 2 is"),
        ("qwen3_vl", dict(preprocessor_config={"do_normalize": False}), "do_normalize=False is not"),
        ("qwen3_vl", dict(preprocessor_config={"rescale_factor": 1}), "rescale_factor=1 is not supported"),
        ("qwen3_vl", dict(preprocessor_config={"merge_size": 4}), "merge_size=4 does not fit"),
    ],
)
def test_a_tower_that_is_not_computed_is_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message):
        read(name, **changes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("depth", 0, "depth must be an integer in 1"),
        ("depth", 10**9, "depth must be an integer in 1"),
        ("hidden_size", "32", "hidden_size must be an integer of at least 1"),
        ("num_heads", None, "lacks 'num_heads'"),
        ("hidden_act", "relu", "hidden_act='relu' in vision_config"),
        ("out_hidden_size", 65, r"features of 65 channels for embed_dim=64"),
        ("deepstack_visual_indexes", [0, 7], r"must be layers of 0\.\.2"),
    ],
)
def test_a_value_that_no_tower_has_is_named(key, value, message):
    vision = load_oracle("qwen3_vl").config["vision_config"] | {key: value}
    with pytest.raises(ValueError, match=message):
        read("qwen3_vl", vision_config=vision)


GEMMA_PREFIXES = [
    ("vision_tower.vision_model.", "multi_modal_projector."),
    ("model.vision_tower.", "model.multi_modal_projector."),
    ("model.vision_tower.vision_model.", "model.multi_modal_projector."),
]


@pytest.mark.parametrize(("tower", "projector"), GEMMA_PREFIXES)
def test_every_prefix_of_gemma_loads(tower, projector):
    weights = {
        (f"{projector}{name[22:]}" if name.startswith("multi_modal_projector.") else name): value
        for name, value in tiny_weights("gemma3").items()
    }
    weights = {
        (f"{tower}{name[13:]}" if name.startswith("vision_tower.") else name): value
        for name, value in weights.items()
    }
    jax.tree.map(np.testing.assert_array_equal, assemble("gemma3", weights), tiny_tower("gemma3"))


def test_every_prefix_of_qwen_loads():
    weights = renamed(tiny_weights("qwen3_vl"), "model.visual.", "visual.")
    jax.tree.map(np.testing.assert_array_equal, assemble("qwen3_vl", weights), tiny_tower("qwen3_vl"))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gemma3", "vision_tower.encoder.layers.1.self_attn.k_proj.bias"),
        ("gemma3", "multi_modal_projector.mm_input_projection_weight"),
        ("qwen3_vl", "model.visual.deepstack_merger_list.1.norm.weight"),
        ("qwen3_5", "model.visual.pos_embed.weight"),
    ],
)
def test_a_renamed_tensor_of_a_tower_is_named_as_missing_and_as_extra(name, tensor):
    weights = renamed(tiny_weights(name), tensor, f"{tensor}s")
    with pytest.raises(WeightsError) as caught:
        assemble(name, weights)
    family = read_config(name).family
    assert str(caught.value) == (
        f"checkpoint: tensors do not fit its config ({family}'s image tower): "
        f"missing: {tensor}; extra: {tensor}s"
    )


def test_deepstack_mergers_that_the_config_does_not_name_are_extra():
    weights = tiny_weights("qwen3_vl")
    raw = load_oracle("qwen3_vl").config
    raw = raw | {"vision_config": raw["vision_config"] | {"deepstack_visual_indexes": [0]}}
    with pytest.raises(WeightsError, match=r"extra: model\.visual\.deepstack_merger_list\.1\."):
        assemble_vision(family_of(raw).read_config(raw), family_of(raw), DictTensors(weights))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma3_image", "qwen3_vl", "qwen3_5"])
def test_random_towers_have_the_shapes_of_their_configs(family, dtype):
    config = tiny_config(family, dtype=dtype)
    params, shapes = random_vision_params(config), vision_param_shapes(config.vision, dtype)
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    found = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params)]
    assert found == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)]
    assert random_vision_params(tiny_config("llama")) is None
