"""config.json in both layouts gives the same config; what the decoder does not do is refused by name."""

import numpy as np
import pytest

from jaxinfer.config import LayerKind
from jaxinfer.models import family_of
from jaxinfer.ops import inverse_frequencies
from jaxinfer.spans import MaskPolicy
from tests.oracles.tiny_checkpoints import load_oracle


def raw_config(name, **changes):
    """config.json of oracle `name` with keys changed; a value of `...` removes the key."""
    raw = load_oracle(name).config | changes
    return {key: value for key, value in raw.items() if value is not ...}


def read(name, **changes):
    raw = raw_config(name, **changes)
    return family_of(raw).read_config(raw)


def windows(config):
    return [layer.window for layer in config.layers]


def legacy_gemma(**changes):
    layout = dict(
        rope_parameters=...,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    return read("gemma3_text", **(layout | changes))


def test_the_legacy_layout_reads_as_the_nested_one():
    assert read("llama", rope_parameters=..., rope_theta=100000.0) == read("llama")
    scaling = load_oracle("llama_rope3").config["rope_parameters"]
    legacy = {key: value for key, value in scaling.items() if key != "rope_theta"}
    nested = read("llama_rope3")
    assert read("llama_rope3", rope_parameters=..., rope_theta=500000.0, rope_scaling=legacy) == nested
    assert legacy_gemma() == read("gemma3_text")


def test_where_both_layouts_are_there_the_nested_value_wins():
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert read("llama", rope_theta=5.0, rope_scaling=scaling) == read("llama")
    both = read("gemma3_text", rope_theta=5.0, rope_local_base_freq=7.0, rope_scaling=scaling)
    assert both == read("gemma3_text")


def test_gemma_scales_the_rope_of_full_layers_only():
    for config in (read("gemma3_text"), legacy_gemma()):
        ropes = {layer.kind: inverse_frequencies(layer.rope) for layer in config.layers}
        exponents = -np.arange(0, 24, 2) / 24
        np.testing.assert_allclose(8 * ropes[LayerKind.FULL_ATTENTION], 1e6**exponents, rtol=1e-12)
        np.testing.assert_allclose(8 * ropes[LayerKind.SLIDING_ATTENTION], 8 * 1e4**exponents, rtol=1e-12)


def test_gemma_layers_follow_layer_types_or_the_pattern():
    assert windows(read("gemma3_text")) == [8, 8, None, 8, 8, None]
    assert windows(read("gemma3_text", layer_types=...)) == [8, 8, 8, 8, 8, None]
    assert windows(read("gemma3_text", layer_types=..., sliding_window_pattern=2)) == [8, None] * 3


def test_gemma_takes_what_a_config_leaves_out_from_the_published_defaults():
    raw = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    config = family_of(raw).read_config(raw | {"num_hidden_layers": 34})
    assert (config.vocab_size, config.num_q_heads, config.num_kv_heads, config.head_dim) == (
        262208,
        8,
        4,
        256,
    )
    assert (config.norm_eps, config.softmax_scale, config.tie_embeddings) == (1e-6, 1 / 16, True)
    assert windows(config) == [4096, 4096, 4096, 4096, 4096, None] * 5 + [4096] * 4


def test_gemma_with_images_reads_its_text_config_and_joins_image_runs():
    text, image = read("gemma3_text"), read("gemma3")
    assert {layer.mask_policy for layer in image.layers} == {MaskPolicy.VISION_BIDIRECTIONAL}
    assert {layer.mask_policy for layer in text.layers} == {MaskPolicy.CAUSAL}
    assert image.image_token_id == 299
    assert text.image_token_id is None
    assert [layer.rope for layer in image.layers] == [layer.rope for layer in text.layers]


def test_gemma_caps_final_logits_in_text_checkpoints_only_and_scores_never():
    assert read("gemma3_text", final_logit_softcapping=30.0).final_logit_soft_cap == 30.0
    assert read("gemma3_text", attn_logit_softcapping=50.0) == read("gemma3_text")
    text = raw_config("gemma3")["text_config"] | {"final_logit_softcapping": 30.0}
    assert read("gemma3", text_config=text).final_logit_soft_cap is None


def test_gemma_with_images_ends_at_the_ids_of_both_levels():
    assert read("gemma3", eos_token_id=[1, 106]).eos_token_ids == (1, 106)


def test_mistral_slides_in_every_layer_unless_its_window_is_null():
    assert windows(read("mistral")) == [8] * 3
    assert windows(read("mistral", sliding_window=None)) == [None] * 3
    assert windows(read("mistral", sliding_window=0)) == [None] * 3
    assert windows(read("mistral", sliding_window=...)) == [4096] * 3


def test_qwen_slides_from_max_window_layers_on_when_it_uses_its_window():
    sliding = dict(use_sliding_window=True, sliding_window=8, max_window_layers=2, layer_types=...)
    assert windows(read("qwen3", **sliding)) == [None, None, 8, 8]
    assert windows(read("qwen3", **sliding | {"use_sliding_window": False})) == [None] * 4
    named = ["sliding_attention", "full_attention"] * 2
    assert windows(read("qwen3", **sliding | {"layer_types": named})) == [8, None, 8, None]


def test_qwen_routes_every_sparse_step_but_the_dense_layers():
    def parts(**changes):
        return [layer.mlp for layer in read("qwen3_moe", **changes).layers]

    assert parts() == ["moe", "dense", "moe"]
    assert parts(mlp_only_layers=[]) == ["moe"] * 3
    assert parts(mlp_only_layers=[], decoder_sparse_step=2) == ["dense", "moe", "dense"]
    moe = read("qwen3_moe").moe
    assert (moe.num_experts, moe.num_experts_per_token, moe.mlp_dim) == (8, 2, 32)
    assert read("qwen3_moe", num_local_experts=..., num_experts=8).moe == moe


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", dict(attention_bias=True), "attention_bias=True: biases are not supported"),
        ("llama", dict(mlp_bias=True), "mlp_bias=True: biases are not supported"),
        ("qwen3", dict(quantization_config={"quant_method": "fp8"}), "'fp8': quantised safetensors are not"),
        ("gemma3", dict(quantization_config={"quant_method": "fp8"}), "'fp8': quantised safetensors are not"),
        ("llama", dict(rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn'; known are"),
        ("llama", dict(rope_parameters={"rope_type": "linear"}), r"rope_type 'linear' without \['factor'\]"),
        ("llama", dict(hidden_act="relu2"), "activation 'relu2'; known are"),
        ("llama", dict(vocab_size=None), "lacks 'vocab_size'"),
        ("llama", dict(model_type="bert"), "model_type 'bert'; known are"),
        ("qwen3", dict(layer_types=["full_attention"]), "1 layer_types for 4 layers"),
        ("qwen3", dict(layer_types=["chunked_attention"] * 4), r"layer_types \['chunked_attention'\]"),
        ("qwen3", dict(rope_parameters={"full_attention": {}}), "expected flat"),
        ("gemma3_text", dict(rope_parameters={"rope_theta": 5.0}), "expected one entry a layer type"),
        ("gemma3_text", dict(use_bidirectional_attention=True), "attention to later text is not supported"),
        ("qwen3_moe", dict(num_experts_per_tok=9), "num_experts_per_tok=9 of 8 experts"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message):
        read(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", dict(num_hidden_layers=0)),
        ("llama", dict(num_hidden_layers=10**9)),
        ("llama", dict(num_hidden_layers="3")),
        ("llama", dict(num_hidden_layers=3.0)),
        ("llama", dict(num_key_value_heads=0)),
        ("llama", dict(head_dim=0)),
        ("llama", dict(max_position_embeddings=True)),
        ("llama", dict(vocab_size=-1)),
        ("llama", dict(rms_norm_eps=float("nan"))),
        ("llama", dict(rms_norm_eps="1e-5")),
        ("llama", dict(rope_theta=-5.0)),
        ("llama", dict(rope_parameters="default")),
        ("llama", dict(eos_token_id="</s>")),
        ("llama", dict(eos_token_id=[2, None])),
        ("mistral", dict(sliding_window=-3)),
        ("gemma3_text", dict(query_pre_attn_scalar=0)),
        ("gemma3_text", dict(sliding_window=1.5)),
        ("gemma3", dict(text_config=[])),
        ("gemma3", dict(text_config={"hidden_size": "64"})),
    ],
)
def test_a_value_that_no_model_has_is_named(name, changes):
    (key,) = changes
    key = "hidden_size" if isinstance(changes[key], dict) else key
    with pytest.raises(ValueError, match=f"config.json: {key} must be .*; got"):
        read(name, **changes)
