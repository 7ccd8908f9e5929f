"""Models whose matrices are int8: every family runs, chunked as whole, close to its bfloat16 self."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.models import param_shapes
from jaxinfer.ops import QuantizedWeight, is_quantized
from jaxinfer.testing import random_params, tiny_config, tiny_model


def stood_for(params):
    """The same params in float32, each quantised weight as what it stands for."""

    def whole(weight):
        if is_quantized(weight):
            return weight.values.astype(jnp.float32) * weight.scale[..., None]
        return weight.astype(jnp.float32)

    return jax.tree.map(whole, params, is_leaf=is_quantized)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "qwen3_5"])
def test_logits_are_those_of_the_weights_that_are_stood_for(family):
    """Within what bfloat16 activations cost, whole and in chunks."""
    config = tiny_config(family, dtype="bfloat16", quantization="int8")
    params = random_params(config)
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, (1, 9)).astype(np.int32)
    exact, _ = ji.forward(stood_for(params), tokens, config=config.with_weight_dtype("float32"))
    whole, _ = ji.forward(params, tokens, config=config)
    state = ji.init_state(config, capacity=16)
    for part in (tokens[:, :5], tokens[:, 5:]):
        chunked, state = ji.forward(params, part, state, config=config)
    for found in (whole, chunked):
        error = float(jnp.sqrt(jnp.mean((found - exact) ** 2)) / jnp.std(exact))
        assert error < 0.05, error


def test_matrices_are_quantised_and_small_weights_are_not():
    config = tiny_config("qwen3_moe", dtype="bfloat16").with_weight_dtype("int8")
    params, shapes = random_params(config), param_shapes(config)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )
    layer = params.layers[0]
    quantised = (params.embedding, layer.mixer.qkv, layer.mixer.out, layer.mlp.gate_up, layer.mlp.down)
    assert all(is_quantized(weight) for weight in quantised)
    assert not isinstance(layer.mlp.router, QuantizedWeight)
    assert layer.mixer_norm.dtype == jnp.float32


def test_the_dtype_of_weights_is_part_of_a_models_identity():
    config = tiny_config("llama", dtype="bfloat16")
    assert config.with_weight_dtype("int8") != config
    assert config.with_weight_dtype("int8").weight_dtype == "int8"
    assert config.with_weight_dtype("int8").with_weight_dtype("float32").quantization is None
    with pytest.raises(ValueError, match="'int8' with dtype='bfloat16'; got 'int8' with dtype='float32'"):
        tiny_config("llama", dtype="float32", quantization="int8")


def test_generation_runs_in_loops_on_the_device():
    model = tiny_model("llama", dtype="bfloat16", quantization="int8")
    alone = [ji.generate(model, [prompt], max_new_tokens=6)[0] for prompt in ("hello", "one two")]
    together = ji.generate(model, ["hello", "one two"], max_new_tokens=6)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
