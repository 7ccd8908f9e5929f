"""Compiles the TPU kernel with the real compiler for a TPU that is not there; prints one JSON line a case.

    python -m tests.pallas_kernels.span_attention.compile_for_tpu v6e:2x2

Needs libtpu. Runs in its own process: a compiler abort ends it, and its settings precede jax.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable

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

from pallas_kernels.span_attention import paged_span_attention, span_attention

# name: (T, N, K, S, H, dtype, options)
CASES = {
    "head_dim 64, ratio 4": (1024, 4, 1, 2048, 64, jnp.bfloat16, {}),
    "head_dim 80, float32": (1000, 2, 2, 1000, 80, jnp.float32, {}),
    "head_dim 128, ratio 8, soft cap": (512, 8, 1, 4096, 128, jnp.bfloat16, {"logits_soft_cap": 50.0}),
    "head_dim 256, few queries": (16, 4, 1, 700, 256, jnp.bfloat16, {}),
    "head_dim 256, float32": (512, 4, 1, 1024, 256, jnp.float32, {}),
}
# name: (C, N, K, H, dtype); 8 sequences of 16 pages of 128 rows
PAGED_CASES = {
    "paged decode": (8, 8, 1, 128, jnp.bfloat16),
    "paged mixed, head_dim 64": (64, 8, 2, 64, jnp.float32),
    "paged prefill, head_dim 256": (256, 16, 4, 256, jnp.bfloat16),
}


def compile_attention(mesh: Mesh, case: tuple) -> str:
    """The optimised program's text."""
    q_len, num_q_heads, num_kv_heads, kv_len, head_dim, dtype, options = case
    shapes = [
        ((2, q_len, num_q_heads, head_dim), dtype),
        ((2, num_kv_heads, kv_len, head_dim), dtype),
        ((2, num_kv_heads, kv_len, head_dim), dtype),
        ((2, q_len), jnp.int32),
        ((2, q_len), jnp.int32),
    ]
    return _compiled(mesh, functools.partial(span_attention, **options), shapes)


def compile_paged(mesh: Mesh, case: tuple) -> str:
    """The optimised program's text."""
    columns, num_q_heads, num_kv_heads, head_dim, dtype = case
    pages = ((64, num_kv_heads, 128, head_dim), dtype)
    integers = [((8, 16), jnp.int32), *[((columns,), jnp.int32)] * 3]
    shapes = [((columns, num_q_heads, head_dim), dtype), pages, pages, *integers]
    return _compiled(mesh, paged_span_attention, shapes)


def _compiled(mesh: Mesh, function: Callable, shapes: list[tuple]) -> str:
    everywhere = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=everywhere) for shape in shapes]

    def attend(*arrays):
        return function(*arrays, softmax_scale=0.125, implementation="pallas_tpu")

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(attend).trace(*arrays).lower(lowering_platforms=("tpu",)).compile().as_text()


def main(topology: str) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    texts = {name: compile_attention(mesh, case) for name, case in CASES.items()}
    texts |= {name: compile_paged(mesh, case) for name, case in PAGED_CASES.items()}
    for name, text in texts.items():
        kernels = text.count('custom_call_target="tpu_custom_call"')
        print(json.dumps({"case": name, "kernels": kernels}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
