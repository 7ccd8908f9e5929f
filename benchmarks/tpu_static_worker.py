# ruff: noqa: E402 - the settings precede the imports
"""Compiles one kernel for a TPU that is not there and prints its static figures as one JSON line.

    python -m benchmarks.tpu_static_worker v6e:1x1 '{"kernel": "span", "kind": "edge", "q_len": 2048,
        "kv_len": 2048, "head_dim": 128, "block_q": 256, "block_kv": 512}'

The compiler's settings precede jax, and a compiler abort ends the process: start one a kernel.
What the kernels do is fixed at compile time here, because the profiler
reads prefetched scalars as zero.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

DUMP = tempfile.mkdtemp(prefix="tpu_static_")
PROFILE = os.environ.get("TPU_STATIC_PROFILE", "1") == "1"
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    LIBTPU_INIT_ARGS=(
        f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final.*utilization|final_bundles "
        + (f"--xla_jf_dump_static_llo_profile_to={DUMP}" if PROFILE else "")
    ),
)

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.span_attention.tpu_kernel import Operands, Program, attend_tiles
from pallas_kernels.span_attention.tpu_schedule import INTERIOR, MASKED, Schedule, Visit

KINDS = {"interior": INTERIOR, "edge": MASKED}


def span(
    *,
    kind,
    q_len,
    kv_len,
    head_dim,
    block_q,
    block_kv,
    heads=2,
    kv_heads=1,
    rows=1,
    per_tile=None,
    dtype="bfloat16",
):
    """One head a query head; a tile visits all kv blocks, or the `per_tile` blocks that end at its own."""
    tiles_per_row, blocks = q_len // block_q, kv_len // block_kv
    visits = per_tile or blocks

    def visit(steps, step):
        tile, nth = lax.div(step, visits), lax.rem(step, visits)
        block = nth if per_tile is None else jnp.maximum(tile * block_q // block_kv - visits + 1 + nth, 0)
        whole = KINDS[kind] if kind in KINDS else jnp.where((nth > 0) & (nth < visits - 1), INTERIOR, MASKED)
        source = 0 if rows == 1 else tile // tiles_per_row
        return Visit(tile, source, block, whole, nth == 0, nth == visits - 1)

    program = Program(
        softmax_scale=head_dim**-0.5,
        logits_soft_cap=None,
        block_q=block_q,
        block_kv=block_kv,
        groups=heads // kv_heads,
        visit=visit,
    )
    tiles = rows * tiles_per_row

    def run(query, key, value, lo, hi, steps, hulls):
        schedule = Schedule(steps, hulls, tiles * visits)
        return attend_tiles(program, Operands(query, key, value, lo, hi, None, None, None), schedule)

    kv = ((rows, kv_heads, kv_len, head_dim), dtype)
    spans = ((tiles, block_q), "int32")
    shapes = [
        ((rows, heads, q_len, head_dim), dtype),
        kv,
        kv,
        spans,
        spans,
        ((2, 8), "int32"),
        ((2, tiles), "int32"),
    ]
    return run, shapes, heads * tiles * visits


def splash(*, kind, q_len, kv_len, head_dim, block_q, block_kv, heads=2, dtype="bfloat16"):
    """jax's splash attention without its prefetched tables: every block visited, all or none masked."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as jax_splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as jax_mask

    masked = kind == "edge"
    sequence = np.arange(q_len, dtype=np.int32) if masked else None
    info = jax_mask.MaskInfo(None, None, None, None, sequence)
    sizes = jax_splash.BlockSizes(block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv)

    def run(query, key, value):
        return jax_splash._splash_attention_forward(
            info, query, key, value, None, None, -1e30, True, sizes, None, False,
            (lambda q, k: q >= k) if masked else None,
        )  # fmt: skip

    kv = ((kv_len, head_dim), dtype)
    return run, [((heads, q_len, head_dim), dtype), kv, kv], heads * (q_len // block_q) * (kv_len // block_kv)


BUILDERS = {"span": span, "splash": splash}


def figures(topology: str, case: dict) -> dict:
    """Returns cycles, bundles, spill stores and loads, and VMEM bytes of one kernel."""
    case = dict(case)
    run, shapes, tiles = BUILDERS[case.pop("kernel")](**case)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    spans = shapes[3][0] if len(shapes) > 3 else None
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for shape, dtype in shapes]

    def pinned(*arrays):
        # XLA would place small operands in VMEM. Spans are reshaped before the kernel, which unpins them.
        whole = [x if x.shape == spans else pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]
        return run(*whole)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(pinned).trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    text = compiled.as_text()
    vmem = re.findall(r'"used_scoped_memory_configs":\[\{"memory_space":"1"[^}]*"size":"(\d+)"', text)
    found = {"tiles": tiles, "vmem_bytes": max(map(int, vmem), default=None), "cycles": _cycles()}
    return found | _bundles() | {"cycles_a_tile": found["cycles"] and round(found["cycles"] / tiles, 1)}


def _cycles() -> int | None:
    """The dearest program's estimate: the others move arrays."""
    files = Path(DUMP).glob("*_static_llo_profile.textproto")
    found = [int(n) for f in files for n in re.findall(r"estimated_cycles: (\d+)", f.read_text())]
    return max(found, default=None)


def _bundles() -> dict:
    """Bundles and spills of the longest program dumped, which is the kernel."""
    best = {"bundles": 0, "spill_stores": None, "spill_loads": None}
    for path in Path(DUMP).glob("*final_hlo-static-per-bundle-utilization.txt"):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        header = next((i for i, line in enumerate(lines) if "VSTORE" in line), None)
        if header is None:
            continue
        names = re.split(r"[\s|,]+", lines[header].strip(" |,"))
        rows = [re.split(r"[\s|,]+", line.strip(" |,")) for line in lines[header + 1 :]]
        rows = [row for row in rows if len(row) == len(names)]
        if len(rows) > best["bundles"]:
            best = {"bundles": len(rows)}
            for field, column in (("spill_stores", "VSTORE:SPILL"), ("spill_loads", "VLOAD:FILL")):
                index = names.index(column)
                best[field] = sum(float(row[index]) > 0 for row in rows)
    return best


if __name__ == "__main__":
    print(json.dumps(figures(sys.argv[1], json.loads(sys.argv[2]))), flush=True)
    if os.environ.get("TPU_STATIC_KEEP"):
        print(DUMP, file=sys.stderr)
