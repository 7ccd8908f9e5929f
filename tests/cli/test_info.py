"""`jaxinfer info` on a tiny model."""

import json
import platform

import jax
import pytest

from jaxinfer import load
from jaxinfer.cli import main
from jaxinfer.state import init_state


def facts(capsys, *arguments: str) -> dict:
    assert main(["info", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_here_is_what_is_installed_and_where_things_lie(capsys, empty_cache):
    found = facts(capsys)
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert [device["platform"] for device in found["devices"]] == [d.platform for d in jax.devices()]
    assert found["cache"] == str(empty_cache)
    assert found["pulled"] == []
    assert found["model"] is None


def test_model_facts_are_those_of_the_loaded_model(chat_model, capsys):
    found = facts(capsys, "--model", str(chat_model))["model"]
    model = load(chat_model)
    leaves = jax.tree.leaves(model.params)
    assert found["family"] == "llama"
    assert found["layers"] == {"full_attention": 3}
    assert found["num_params"] == sum(leaf.size for leaf in leaves)
    assert found["params_bytes"] == sum(leaf.nbytes for leaf in leaves)
    assert found["dtype"] == model.config.dtype == "float32"
    assert found["vocab_size"] == 256
    assert found["max_positions"] == 512
    assert found["chat_template"] is True
    assert found["licence"] is None
    assert found["file_bytes"] > found["params_bytes"]


def test_another_dtype_halves_the_weights(chat_model, capsys):
    found = facts(capsys, "--model", str(chat_model), "--dtype", "bfloat16")["model"]
    leaves = jax.tree.leaves(load(chat_model, dtype="bfloat16").params)
    assert found["dtype"] == "bfloat16"
    assert found["params_bytes"] == sum(leaf.nbytes for leaf in leaves)


def test_bytes_a_token_are_those_that_a_longer_state_has_more(chat_model, capsys):
    found = facts(capsys, "--model", str(chat_model))["model"]
    config = load(chat_model).config
    sizes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(init_state(config, capacity=capacity, dtype="float32")))
        for capacity in (100, 101)
    ]
    assert found["kv_dtype"] == "float32"
    assert found["kv_bytes_per_token"] == sizes[1] - sizes[0]


def test_people_read_a_plain_report_when_it_is_piped(base_model, capsys):
    assert main(["info", "--model", str(base_model)]) == 0
    written = capsys.readouterr()
    assert written.err == ""
    assert "\x1b" not in written.out
    rows = dict(line.strip().split("  ", 1) for line in written.out.splitlines() if "  " in line.strip())
    assert rows["Layers"].strip() == "3 full attention"
    assert rows["Trained length"].strip() == "64 positions"
    assert rows["Chat template"].strip() == "none: a base model, continues text"
    assert rows["Licence"].strip() == "the checkpoint does not say"


def test_without_the_default_model_the_report_says_how_to_get_it(capsys):
    assert main(["info"]) == 0
    assert "`jaxinfer pull smollm2-135m`" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "code"), [("nowhere", 2), ("gemma3-270m", 1)])
def test_a_model_that_is_not_there_is_one_line(capsys, model, code):
    assert main(["info", "--model", model]) == code
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1


@pytest.mark.real("smollm2-135m")
def test_a_known_model_has_its_licence(capsys, monkeypatch):
    monkeypatch.undo()  # the real cache
    found = facts(capsys, "--model", "smollm2-135m")["model"]
    assert found["licence"] == "Apache-2.0"
    assert found["layers"] == {"full_attention": 30}
    assert found["num_params"] == 134_515_008
