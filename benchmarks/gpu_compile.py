"""Compiles kernels to SASS for a GPU that is not there; prints one JSON line a case.

    python -m benchmarks.gpu_compile H200 [--ours | CASE ...]

Needs the `gpu-aot` extra. Runs in its own process: the dump's folder is read once, and a kernel built for
a GPU that it is not written for ends the process.
"""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

DUMP = Path(tempfile.mkdtemp(prefix="mosaic-gpu-"))
CUDA_BIN = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
_FLAGS = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS", "MOSAIC_GPU_DUMP_RESOURCES")
os.environ.update(JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_TO=str(DUMP), **dict.fromkeys(_FLAGS, "1"))
os.environ["PATH"] = f"{CUDA_BIN}{os.pathsep}{os.environ['PATH']}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from benchmarks.gpu_cases import CASES, PEER  # noqa: E402
from benchmarks.gpu_targets import TARGETS  # noqa: E402


def target_mesh(target: str) -> Mesh:
    """A mesh of one device that is not there."""
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=TARGETS[target], topology="1x1x1"
    ).devices
    return Mesh(np.array(devices[:1]), ("x",))


def compile_for(mesh: Mesh, function: Callable, shapes: list[jax.ShapeDtypeStruct]) -> None:
    """Compiles function(*shapes) for the mesh's device, leaving the kernels' dumps in `DUMP`."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).compile()


def kernels() -> list[dict[str, int | str]]:
    """The figures of every kernel dumped since the last call; the dumps are removed.

    registers: a thread's at launch; spill bytes: moved to memory, all stores and loads in the code;
    hgmma, utmaldg: instructions in the code, not how often they run.
    """
    found = []
    for report in sorted(DUMP.glob("*.ptxas")):
        text = report.read_text()
        code = next(DUMP.glob(f"{report.stem}.sass*")).read_text()
        shared = _number(r"smem_scratch_bytes=(\d+)", (DUMP / f"{report.stem}.resources.txt").read_text())
        found.append(
            {
                "kernel": report.stem,
                "registers": _number(r"Used (\d+) registers", text),
                "spill_bytes": _number(r"(\d+) bytes spill stores", text)
                + _number(r"(\d+) bytes spill loads", text),
                "shared_bytes": shared,
                "hgmma": len(re.findall(r"\bHGMMA\b", code)),
                "utmaldg": len(re.findall(r"\bUTMALDG\b", code)),
                "instructions": len(re.findall(r"/\*[0-9a-f]{4,}\*/", code)),
            }
        )
    for path in DUMP.iterdir():
        path.unlink()
    return found


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"a kernel's dump has no {pattern!r}: {text[:500]}")
    return int(match.group(1))


def main(target: str, names: list[str]) -> None:
    mesh = target_mesh(target)
    if names == ["--ours"]:
        names = [name for name in CASES if not name.startswith(PEER)]
    for name in names or CASES:
        compile_for(mesh, *CASES[name]())
        print(json.dumps({"case": name, "jax": jax.__version__, "kernels": kernels()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
