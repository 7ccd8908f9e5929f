"""A checkpoint's tensors become params whatever their prefix and layout; what does not fit is named."""

import jax
import numpy as np
import pytest

from jaxinfer.models import WeightsError
from tests.models.tiny_models import DictTensors, assemble, tiny_params
from tests.oracles.tiny_checkpoints import tiny_weights


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def renamed(weights, old, new):
    return {name.replace(old, new, 1): value for name, value in weights.items()}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_every_prefix_loads(prefix):
    assert_same(
        assemble("llama", DictTensors(renamed(tiny_weights("llama"), "model.", prefix))), tiny_params("llama")
    )


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_a_renamed_tensor_is_named_as_missing_and_as_extra(prefix):
    weights = renamed(tiny_weights("llama"), "model.", prefix)
    weights = renamed(weights, "embed_tokens", "embeddings")
    with pytest.raises(WeightsError) as caught:
        assemble("llama", DictTensors(weights))
    assert str(caught.value) == (
        "checkpoint: tensors do not fit its config (llama): "
        f"missing: {prefix}embed_tokens.weight; extra: {prefix}embeddings.weight"
    )


def test_a_misshapen_tensor_is_named_with_both_shapes():
    weights = tiny_weights("llama")
    weights["model.norm.weight"] = np.ones(71, np.float32)
    with pytest.raises(WeightsError, match=r"misshapen: model\.norm\.weight is \[71\], expected \[72\]$"):
        assemble("llama", DictTensors(weights))


def test_an_untied_config_needs_a_head():
    weights = tiny_weights("mistral")
    del weights["lm_head.weight"]
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight$"):
        assemble("mistral", DictTensors(weights))


def test_a_distinct_head_of_a_tied_config_is_used_and_a_repeated_one_is_not(caplog):
    weights = tiny_weights("llama")
    embedding = weights["model.embed_tokens.weight"]
    assert assemble("llama", DictTensors(weights | {"lm_head.weight": embedding})).lm_head is None
    assert not caplog.records
    params = assemble("llama", DictTensors(weights | {"lm_head.weight": 2 * embedding}))
    np.testing.assert_array_equal(params.lm_head, 2 * embedding)
    assert "lm_head.weight differs from it and is used" in caplog.text


def test_a_vision_tower_in_a_text_checkpoint_is_extra():
    weights = tiny_weights("gemma3_text") | {"vision_tower.post_layernorm.weight": np.ones(4, np.float32)}
    with pytest.raises(WeightsError, match=r"extra: vision_tower\.post_layernorm\.weight$"):
        assemble("gemma3_text", DictTensors(weights))


def test_rope_buffers_of_old_checkpoints_do_not_count():
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)}
    assert_same(assemble("llama", DictTensors(tiny_weights("llama") | buffer)), tiny_params("llama"))


def test_fused_experts_load_as_separate_ones():
    weights = {}
    for name, value in tiny_weights("qwen3_moe").items():
        if ".experts." not in name:
            weights[name] = value
    for layer in (0, 2):
        at = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: np.stack(
                [tiny_weights("qwen3_moe")[f"{at}{expert}.{part}_proj.weight"] for expert in range(8)]
            )
            for part in ("gate", "up", "down")
        }
        weights[f"{at}gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        weights[f"{at}down_proj"] = parts["down"]
    assert_same(assemble("qwen3_moe", DictTensors(weights)), tiny_params("qwen3_moe"))


def test_norm_scales_that_include_the_one_are_taken_as_they_are():
    weights = {
        name: value + np.float32(1) if name.endswith("norm.weight") else value
        for name, value in tiny_weights("gemma3_text").items()
    }
    assert_same(
        assemble("gemma3_text", DictTensors(weights, norm_scales_include_one=True)),
        tiny_params("gemma3_text"),
    )
