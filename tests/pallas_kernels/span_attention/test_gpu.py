"""The Mosaic GPU kernels: interpreted they agree with the oracle, without a race; their tables are right.

Interpreted, wgmma is a plain product; whether the compiler takes the kernels is another test's question
(`-m gpu_aot`), and what they do on a GPU that of `benchmarks/gpu_device.py`.
"""

import functools
import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.span_attention import api, available_implementations, span_attention
from pallas_kernels.span_attention.blocks import canonical_spans, may_hold_unread_rows

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU of jax 0.11.2")


@needs_mosaic
@pytest.mark.parametrize("cases", ["small", pytest.param("all", marks=pytest.mark.slow)])
def test_the_interpreted_kernels_agree_with_the_oracle_and_have_no_race(cases):
    command = [sys.executable, "-m", "tests.pallas_kernels.span_attention.interpret_gpu", cases]
    environment = {**os.environ, "NPROC": "16"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {case["form"] for case in found} == {"prefill", "decode", "paged"}
    assert not [case for case in found if not case["error"] < 1e-2]


@pytest.mark.parametrize("seed", range(4))
def test_a_block_said_to_be_read_is_read_to_its_last_row(seed):
    draw = np.random.default_rng(seed)
    kv_len, block_kv = 700, 64
    lo = draw.integers(-20, kv_len, (2, 9)).astype(np.int32)
    hi = (lo + draw.integers(-40, 200, (2, 9))).astype(np.int32)
    rows = np.arange(kv_len)
    read = ((lo[..., None] <= rows) & (rows <= hi[..., None])).any(axis=1)
    unread = np.asarray(
        may_hold_unread_rows(*canonical_spans(lo, hi, kv_len), kv_len=kv_len, block_kv=block_kv)
    )
    starts = range(0, kv_len, block_kv)
    every = np.array([[row[start : start + block_kv].all() for start in starts] for row in read])
    assert every[unread == 0].all()
    assert (unread == 0).any()
    assert (unread == 1).any()


def test_causal_rows_and_windows_leave_no_block_to_clear():
    rows = jnp.arange(640, dtype=jnp.int32)[None]
    for lo in (jnp.zeros_like(rows), jnp.maximum(rows - 99, 0)):
        assert not may_hold_unread_rows(lo, rows, kv_len=640, block_kv=64).any()


@needs_mosaic
def test_the_tile_table_says_what_each_tile_visits_and_what_goes_unmasked():
    from pallas_kernels.span_attention.gpu import _tile_table

    rows = jnp.arange(512, dtype=jnp.int32)[None]
    table = _tile_table(jnp.maximum(rows - 199, 0), rows.at[:, 384:].set(-1), kv_len=512, block_kv=64)
    assert table[0, 1].tolist() == [0, 4, 0, 3, 0, 2, 0, 4, 1, 3]
    assert table[0, 2].tolist() == [0, 6, 0, 5, 2, 4, 1, 6, 3, 5]
    assert table[0, 3, :6].tolist()[:2] == [0, 0]  # visits nothing


@pytest.mark.parametrize(
    ("platform", "kind", "reason"),
    [
        ("cpu", "cpu", "the target device is a cpu"),
        ("gpu", "Tesla T4", "compute capability 9.x; the target device, 'Tesla T4'"),
        ("gpu", "NVIDIA B200", "compute capability 9.x; the target device, 'NVIDIA B200'"),
        ("gpu", "NVIDIA H200", None),
        ("gpu", "NVIDIA H100 80GB HBM3", None),
    ],
)
def test_a_device_that_the_kernel_is_not_for_is_refused_with_the_reason(monkeypatch, platform, kind, reason):
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    mesh = types.SimpleNamespace(abstract_device=device)
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    if platform == "gpu" and jax.__version_info__ < (0, 11, 2):
        reason = "needs jax 0.11.2"
    found = available_implementations()["pallas_gpu"]
    assert found is None if reason is None else reason in str(found)


def test_float32_is_refused_by_name_and_taken_by_another_form_otherwise(monkeypatch):
    monkeypatch.setattr(api, "hopper_refusal", lambda: None)
    rows, spans = jnp.zeros((1, 2, 8, 64)), jnp.zeros((1, 3), jnp.int32)
    attend = functools.partial(
        span_attention, jnp.zeros((1, 3, 4, 64)), rows, rows, spans, spans, softmax_scale=0.1
    )
    with pytest.raises(NotImplementedError, match="it takes bfloat16"):
        attend(implementation="pallas_gpu")
    assert not attend().any()
