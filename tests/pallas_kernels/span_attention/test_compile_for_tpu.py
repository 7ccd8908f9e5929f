"""The TPU kernel is accepted by the TPU compiler; `python -m pytest -m tpu_aot`, with the `tpu-aot` extra."""

import json
import subprocess
import sys

import pytest


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_every_case_compiles_to_one_kernel(topology):
    module = "tests.pallas_kernels.span_attention.compile_for_tpu"
    done = subprocess.run(
        [sys.executable, "-m", module, topology], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 8
    assert all(case["kernels"] == 1 for case in found)
