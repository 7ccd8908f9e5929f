"""Seconds to trace and lower a deep model's steps, without weights: `python -m benchmarks.tracing`; JSON.

The config is Gemma 3 27B's: 62 layers, five sliding ones to each full one.
"""

from __future__ import annotations

import functools
import json
import time

import jax
import jax.numpy as jnp

import jaxinfer as ji
from jaxinfer.models import family_of, param_shapes

GEMMA_3_27B = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 168,
    "vocab_size": 262_208,
}


def main() -> None:
    config = family_of(GEMMA_3_27B).read_config(GEMMA_3_27B).with_weight_dtype("bfloat16")
    state = jax.eval_shape(functools.partial(ji.init_state, config, capacity=8192))
    step = jax.jit(functools.partial(ji.forward, config=config), donate_argnums=2)
    found = {"jax": jax.__version__, "layers": len(config.layers)}
    for name, columns in (("prefill of 512 columns", 512), ("decode", 1)):
        tokens = jax.ShapeDtypeStruct((1, columns), jnp.int32)
        began = time.perf_counter()
        traced = step.trace(param_shapes(config), tokens, state)
        between = time.perf_counter()
        text = traced.lower().as_text()
        found[name] = {
            "trace_s": round(between - began, 2),
            "lower_s": round(time.perf_counter() - between, 2),
            "program_kib": len(text) // 1024,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
