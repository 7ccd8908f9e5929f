"""The tables in README.md and docs/performance.md are what the results give; and how they are made."""

import json

import pytest

from benchmarks.plots import draw_speed
from benchmarks.tables import (
    BEGIN,
    END,
    RESULTS,
    load_results,
    pages,
    performance_block,
    readme_block,
    with_block,
)


def contender(library, versions, **facts):
    return {"library": library, "dtype": "float32", "mode": "", "versions": versions, "load_s": 0.5} | facts


def result(tokens_per_s, median_ms, disturbed=0):
    return {
        "tokens_per_s": tokens_per_s,
        "median_ms": median_ms,
        "disturbed_samples": disturbed,
        "foreign_load": 0.02,
    }


def end_to_end(jax="0.12.0", disturbed=0):
    own, peer = "jaxinfer/float32", "transformers/float32"
    ratios = {own: {"same_dtype": {"peer": peer, "times_as_fast": 1.5}}}
    results = {own: result(1500.0, 100.0, disturbed), peer: result(1000.0, 150.0)}
    decode = {"measure": "decode", "batch": 1, "steps": 10, "results": results, "ratios": ratios}
    return {
        "benchmark": "end_to_end",
        "model": "tiny",
        "file": "tiny.gguf",
        "environment": {
            "cpu": "A CPU",
            "threads": 2,
            "date": "2030-01-02",
            "commit": "0123456789abcdef",
            "library_changed_since": False,
            "malloc": "glibc's own",
        },
        "settings": {"repeats": 3, "max_foreign_load": 0.1},
        "contenders": {
            own: contender("jaxinfer", {"jax": jax, "jaxlib": jax}),
            peer: contender("transformers", {"torch": "2.0"}),
        },
        "cells": [
            {"measure": "prefill", "tokens": 128, "batch": 1, "results": results, "ratios": ratios},
            decode | {"context": 512},
            decode | {"context": 4096},
        ],
    }


def test_the_tables_in_the_pages_are_what_the_results_give():
    for path, text in pages(load_results()).items():
        assert path.read_text() == text, f"{path.name} is out of date: python -m benchmarks.tables"


def test_every_result_is_in_the_performance_page():
    results = load_results()
    block = performance_block(results)
    assert results.keys() == {path.stem for path in RESULTS.glob("*.json")}
    assert all(f"### {name}\n" in block for name in results)


def test_results_name_no_path_of_the_machine_they_come_from():
    for path in RESULTS.glob("*.json"):
        assert "/home" not in path.read_text()
        assert "/root" not in path.read_text()


def test_speed_and_ratio_stand_in_the_readme():
    block = readme_block({"a": end_to_end()})
    assert "| tokens/s | prefill 128 | decode x1 at 512 | decode x1 at 4,096 |" in block
    assert "| jaxinfer float32 | 1,500 | 1,500 | 1,500 |" in block
    assert (
        "| jaxinfer float32 against the best peer of its dtype | **1.50x** | **1.50x** | **1.50x** |" in block
    )
    assert "commit 0123456, " in block


def test_the_machine_s_limits_stand_beside_what_a_decode_step_reads():
    record = end_to_end()
    record["limits"] = {"copy_gb_s": 30.2, "read_gb_s": 25.0}
    record["limits"] |= {"matmul_float32_gflop_s": 240.0, "matmul_bfloat16_gflop_s": 1000.0}
    record["contenders"]["jaxinfer/float32"]["params_bytes"] = 100_000_000
    block = performance_block({"a": record})
    assert "| bfloat16 matmul, GFLOP/s | 1,000 |" in block
    assert "| jaxinfer float32: weights read, decode x1 at 512, GB/s | 10.0 (40% of reading) |" in block


def test_the_picture_shows_every_measurement_and_contender(tmp_path):
    record = end_to_end()
    for name in ("one.svg", "two.svg"):
        draw_speed({"tiny": record}, tmp_path / name)
    picture = (tmp_path / "one.svg").read_text()
    for text in ("prefill 128", "decode x1 at 512", "decode x1 at 4,096", "transformers float32", "1,500"):
        assert text in picture
    assert picture == (tmp_path / "two.svg").read_text()


def test_a_disturbed_figure_is_marked_and_explained():
    block = readme_block({"a": end_to_end(disturbed=1)})
    assert "1,500*" in block
    assert "* disturbed" in block


def test_the_readme_shows_a_model_under_its_newest_jax():
    block = readme_block({"a": end_to_end("0.12.0"), "b": end_to_end("0.9.9")})
    assert "jax 0.12.0" in block
    assert "jax 0.9.9" not in block


def test_rows_of_a_single_operation_become_a_table():
    record = {"benchmark": "sampling", "unit": "ms", "results": [{"batch": 1, "greedy": 0.5}, {"batch": 8}]}
    block = performance_block({"sampling": record})
    assert "| batch | greedy |\n| --- | ---: |\n| 1 | 0.5 |\n| 8 | - |" in block


def test_a_result_without_a_table_is_refused(tmp_path):
    (tmp_path / "odd.json").write_text(json.dumps({"benchmark": "unheard of"}))
    with pytest.raises(ValueError, match=r"results/odd\.json: no table is known for 'unheard of'"):
        load_results(tmp_path)


@pytest.mark.parametrize("text", ["none", BEGIN, END + BEGIN, BEGIN + END + BEGIN + END])
def test_markers_stand_once_and_in_order(text):
    with pytest.raises(ValueError, match="once each"):
        with_block(text, "table")


def test_only_what_is_between_the_markers_changes():
    assert with_block(f"a\n{BEGIN}\nold\n{END}\nb", "new") == f"a\n{BEGIN}\nnew\n{END}\nb"
