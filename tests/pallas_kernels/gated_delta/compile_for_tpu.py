"""Compiles the gated delta kernels with the real compiler for a TPU that is not there; a JSON line a case.

    python -m tests.pallas_kernels.gated_delta.compile_for_tpu v6e:2x2

Needs libtpu. Runs in its own process: a compiler abort ends it, and its settings precede jax.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.gated_delta import gated_delta_chunk, gated_delta_step

# name: (B, T, nk, nv, dk, dv, dtype, number of checkpoints)
CASES = {
    "prefill, 128 x 128, bfloat16": (1, 300, 2, 4, 128, 128, jnp.bfloat16, 2),
    "prefill, 128 x 128, float32": (2, 256, 2, 4, 128, 128, jnp.float32, 0),
    "prefill, 64 x 64, float32, one value head a key head": (1, 200, 2, 2, 64, 64, jnp.float32, 1),
    "prefill, 256 x 256, bfloat16": (1, 128, 1, 2, 256, 256, jnp.bfloat16, 1),
    "prefill, 128 x 64, bfloat16": (1, 70, 2, 4, 128, 64, jnp.bfloat16, 0),
    "step, 128 x 128, bfloat16": (8, 1, 16, 32, 128, 128, jnp.bfloat16, 0),
    "step, 64 x 128, float32": (2, 1, 3, 6, 64, 128, jnp.float32, 0),
    "step, 256 x 256, bfloat16": (2, 1, 4, 8, 256, 256, jnp.bfloat16, 0),
}


def compile_case(mesh: Mesh, case: tuple, *, static_lengths: bool = False) -> str:
    """The optimised program's text; `static_lengths`: every column is real."""
    batch, q_len, num_key_heads, num_value_heads, key_dim, value_dim, dtype, checkpoints = case
    everywhere = NamedSharding(mesh, PartitionSpec())

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    keys = array(batch, q_len, num_key_heads, key_dim)
    gates = (batch, q_len, num_value_heads)
    arrays = [keys, keys, array(*gates, value_dim), array(*gates, dtype=jnp.float32), array(*gates)]
    state = array(batch, num_value_heads, key_dim, value_dim, dtype=jnp.float32)
    lengths = None if static_lengths else array(batch, dtype=jnp.int32)
    columns = array(batch, checkpoints, dtype=jnp.int32) if checkpoints else None

    def run(arrays, state, lengths, columns):
        options = {"initial_state": state, "lengths": lengths, "implementation": "pallas_tpu"}
        if q_len == 1:
            return gated_delta_step(*arrays, **options)
        return gated_delta_chunk(*arrays, **options, checkpoint_columns=columns)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(run, donate_argnums=1).trace(arrays, state, lengths, columns)
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


def main(topology: str, *names: str) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    for name in names or CASES:
        text = compile_case(mesh, CASES[name])
        kernels = text.count('custom_call_target="tpu_custom_call"')
        print(json.dumps({"case": name, "kernels": kernels}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
