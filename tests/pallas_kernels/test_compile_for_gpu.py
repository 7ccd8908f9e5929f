"""The GPU kernels pass the CUDA compiler; `python -m pytest -m gpu_aot`, with the `gpu-aot` extra."""

import json
import os
import subprocess
import sys

import pytest

THREADS_A_BLOCK = 384
REGISTERS_A_BLOCK = 65536
SHARED_BYTES_A_BLOCK = 232448  # compute capability 9.0, opted in


@pytest.mark.gpu_aot
def test_every_kernel_compiles_for_an_h200_with_tensor_cores_and_tma_and_without_spills():
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_compile", "H200", "--ours"],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 8
    for case in found:
        assert len(case["kernels"]) == 1, case
        kernel = case["kernels"][0]
        assert kernel["spill_bytes"] == 0, case
        assert kernel["hgmma"] > 0, case
        assert kernel["utmaldg"] > 0, case
        assert kernel["registers"] * THREADS_A_BLOCK <= REGISTERS_A_BLOCK, case
        assert kernel["shared_bytes"] <= SHARED_BYTES_A_BLOCK, case


@pytest.mark.gpu_aot
def test_a_gpu_that_is_no_hopper_is_refused_by_name_before_anything_is_compiled():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_compile", "B200", "span prefill, d64"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode != 0
    assert "compute capability 9.x" in done.stderr
