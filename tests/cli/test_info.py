"""`jaxinfer info` on a tiny model."""

import json
import platform

import jax
import pytest

from jaxinfer import load
from jaxinfer.cli import main
from jaxinfer.state import KvWindowPolicy, init_state


def num_bytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


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


def test_the_budget_is_what_a_state_allocates(chat_model, capsys):
    found = facts(capsys, "--model", str(chat_model), "--context", "100")["state"]
    sizes = [num_bytes(init_state(load(chat_model).config, capacity=n, dtype="float32")) for n in (100, 101)]
    assert found["context"] == 100
    assert found["kv_dtype"] == "float32"
    assert found["kv_bytes_per_token"] == sizes[1] - sizes[0]
    assert found["keep_all"]["allocated_bytes"] == sizes[0]
    assert sum(part["state_bytes"] for part in found["keep_all"]["kinds"]) == sizes[0]
    assert found["keep_all"]["longest_context"] is None


def test_eviction_saves_on_sliding_layers_and_the_longest_context_fits(sliding_model, capsys):
    options = ("--model", str(sliding_model), "--budget", "1MB")
    found = facts(capsys, *options)["state"]
    config = load(sliding_model).config
    policy = KvWindowPolicy.on()
    state = init_state(config, capacity=config.max_positions, dtype="float32", kv_window=policy)
    assert found["context"] == config.max_positions
    assert found["evict"]["allocated_bytes"] == num_bytes(state) < found["keep_all"]["allocated_bytes"]
    longest = found["keep_all"]["longest_context"]
    assert longest < config.max_positions == found["evict"]["longest_context"]
    fitting, too_large = (
        num_bytes(init_state(config, capacity=n, dtype="float32")) for n in (longest, longest + 1)
    )
    assert fitting <= 1_000_000 < too_large


def test_the_budget_is_shown_in_bars_for_the_policy_that_was_asked_for(sliding_model, capsys, monkeypatch):
    monkeypatch.delenv("JAXINFER_KV_WINDOW", raising=False)
    options = ["info", "--model", str(sliding_model), "--budget", "1MB"]
    reports = []
    for extra in ([], ["--kv-window"]):
        assert main([*options, *extra]) == 0
        reports.append(capsys.readouterr().out)
    shown = [report[report.index("State of") :].splitlines() for report in reports]
    for lines in shown:
        assert lines[0] == "State of 4,096 positions in float32"
        assert lines[1].split()[:3] == ["3", "sliding", "attention"]
        assert "█" in lines[1]
        assert lines[1].endswith("100%")
    assert shown[0][1] != shown[1][1]
    assert "saves" in reports[0]
    assert "Longest context in 1.0 MB (weights not counted)" in reports[0]
    assert "the trained length" in reports[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--budget", "3x"), "argument --budget: '3x' is not a size"),
        (("--budget", "3"), "KvResidency.max_capacity(budget_bytes=3) must be at least"),
        (("--context", "0"), "init_state(capacity=...) must be an int of at least 1; got 0"),
    ],
)
def test_a_budget_that_makes_no_sense_is_bad_use(chat_model, capsys, options, reason):
    assert main(["info", "--model", str(chat_model), *options]) == 2
    assert reason in capsys.readouterr().err


def test_a_budget_needs_a_model(capsys):
    assert main(["info", "--budget", "1GiB"]) == 2
    assert "a budget needs a --model" in capsys.readouterr().err


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
