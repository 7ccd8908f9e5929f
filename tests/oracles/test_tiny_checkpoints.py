"""The rebuilt tiny checkpoints are those that transformers was given; it still says the same of them."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.oracles import tiny_checkpoints


@pytest.mark.parametrize("name", tiny_checkpoints.ORACLES)
def test_rebuilt_weights_are_bitwise_those_that_the_logits_were_computed_with(name):
    weights = tiny_checkpoints.tiny_weights(name)
    assert tiny_checkpoints.weights_digest(weights) == tiny_checkpoints.recorded_digest(name)


@pytest.mark.parametrize("name", tiny_checkpoints.ORACLES)
def test_oracle_logits_are_spread_enough_to_tell_tokens_apart(name):
    oracle = tiny_checkpoints.load_oracle(name)
    assert oracle.logits.dtype == np.float32
    assert oracle.logits.shape[0] == oracle.inputs["input_ids"].shape[1]
    assert oracle.logits.std() >= 1
    assert int(np.argmax(oracle.logits[-1])) == int(oracle.greedy_ids[0])


def test_written_checkpoint_holds_the_config_and_the_weights(tmp_path):
    directory = tiny_checkpoints.write_checkpoint("llama", tmp_path / "checkpoint")
    assert json.loads((directory / "config.json").read_text()) == tiny_checkpoints.load_oracle("llama").config
    written, expected = load_file(directory / "model.safetensors"), tiny_checkpoints.tiny_weights("llama")
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(written[name], value)


def test_written_checkpoint_takes_other_weights(tmp_path):
    weights = {"renamed": np.ones((2, 3), np.float32)}
    directory = tiny_checkpoints.write_checkpoint("llama", tmp_path, weights=weights)
    assert list(load_file(directory / "model.safetensors")) == ["renamed"]


@pytest.mark.oracle
@pytest.mark.parametrize("name", tiny_checkpoints.ORACLES)
def test_transformers_still_computes_the_committed_logits(name, tmp_path):
    from tests.oracles import make_model_oracles as maker

    model = maker.load_model(name, tmp_path)
    logits, greedy_ids, margin = maker.compute(model, maker.model_inputs(maker.FAMILIES[name]))
    oracle = tiny_checkpoints.load_oracle(name)
    np.testing.assert_allclose(logits, oracle.logits, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(greedy_ids, oracle.greedy_ids)
    assert margin > 0.03
