"""`jaxinfer bench` on a tiny model: what it reports holds together; how fast it is, no test can say."""

import json

import jax
import pytest

from jaxinfer.cli import bench, main
from jaxinfer.measuring import limits

SMALL = ("--prefill", "16", "--context", "24", "--steps", "4", "--repeats", "2")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """Limits of small arrays: the test is of the report, not of the machine."""
    monkeypatch.setattr(limits, "_BYTES", 2**16)
    monkeypatch.setattr(limits, "_MATMUL_DIM", 64)


def test_every_measure_has_a_row_whose_rate_follows_from_its_time(base_model, capsys):
    assert main(["bench", "--model", str(base_model), *SMALL, "--batch", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["measure"], row["batch"]): row for row in found["rows"]}
    assert rows.keys() == {("prefill", 1), ("decode", 3)}
    tokens = {("prefill", 1): 16, ("decode", 3): 12}
    for key, row in rows.items():
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens[key] / row["median_ms"], rel=0.01)
        assert row["first_ms"] > 0
    step = rows["decode", 3]
    weights_gb_s = 4 * found["weight_bytes"] / step["median_ms"] / 1e6
    assert step["weights_gb_s"] == pytest.approx(weights_gb_s, rel=0.01, abs=0.006)
    assert found["versions"]["jax"] == jax.__version__
    assert found["load_s"] > 0
    report = bench._report(found)
    assert "decode x3 at 24" in report
    assert f"{found['rows'][0]['median_ms']:,.1f}" in report


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--steps", "65"), "--steps must be in 1..64; got 65"),
        (("--context", "16"), "--context must be more than --steps, 16; got 16"),
        (("--batch", "0"), "must be at least 1"),
        (("--context", "65"), "the model has 64 positions; asked are 512"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(base_model, capsys, arguments, said):
    assert main(["bench", "--model", str(base_model), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_prompts_do_not_change_from_run_to_run(base_model):
    from jaxinfer import load

    model = load(base_model)
    assert bench._prompt(model, 8) == bench._prompt(model, 8)
    assert bench._prompt(model, 8)[:4] == bench._prompt(model, 4)
