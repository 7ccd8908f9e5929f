"""Time and peak memory of `load`, each in a process of its own: `python -m benchmarks.loading`; JSON out.

Memory is what the process had resident at most while it loaded, above what it had after its imports and a
first jax call, over the bytes of the parameters. Without `--models` the model is a random one in
safetensors shards, written for the purpose.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_record, pin_threads, wait_until_quiet, worker_environment
from benchmarks.worker import peak_bytes

_SHARDS, _LAYERS, _EMBED, _MLP, _VOCAB = 4, 16, 1024, 4096, 32_000
_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": _VOCAB,
    "hidden_size": _EMBED,
    "intermediate_size": _MLP,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_random_shards(directory: Path) -> Path:
    """Writes a bfloat16 Llama-shaped checkpoint in `_SHARDS` files with an index; returns `directory`."""
    import ml_dtypes
    import numpy as np
    import safetensors.numpy
    import tokenizers

    kv_dim = _EMBED // 16 * 4
    shapes = {"model.embed_tokens.weight": (_VOCAB, _EMBED), "lm_head.weight": (_VOCAB, _EMBED)}
    shapes["model.norm.weight"] = (_EMBED,)
    for index in range(_LAYERS):
        rows = {"self_attn.q_proj": _EMBED, "self_attn.k_proj": kv_dim, "self_attn.v_proj": kv_dim}
        rows |= {"self_attn.o_proj": _EMBED, "mlp.gate_proj": _MLP, "mlp.up_proj": _MLP}
        named: dict[str, tuple[int, ...]] = {name: (size, _EMBED) for name, size in rows.items()}
        named |= {"mlp.down_proj": (_EMBED, _MLP), "input_layernorm": (_EMBED,)}
        named["post_attention_layernorm"] = (_EMBED,)
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in named.items()}
    random, weight_map = np.random.default_rng(0), {}
    for shard in range(_SHARDS):
        name = f"model-{shard + 1:05d}-of-{_SHARDS:05d}.safetensors"
        part = dict(list(shapes.items())[shard::_SHARDS])
        tensors = {
            key: random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
            for key, shape in part.items()
        }
        safetensors.numpy.save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def load_here(model: str, dtype: str | None) -> dict[str, Any]:
    """Loads in this process and returns what it took."""
    import jax
    import jax.numpy as jnp

    import jaxinfer as ji

    jax.block_until_ready(jnp.zeros(8) + 1)
    imported_bytes = _resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    began = time.perf_counter()
    loaded = jax.block_until_ready(ji.load(model, dtype=dtype).params)
    load_s = time.perf_counter() - began
    parameter_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
    above = (peak_bytes() or 0) - imported_bytes
    return {
        "load_s": round(load_s, 3),
        "parameter_bytes": parameter_bytes,
        "peak_bytes_above_imports": above,
        "peak_over_parameters": round(above / parameter_bytes, 3),
        "jax": jax.__version__,
    }


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def measure(model: str, dtype: str | None, repeats: int) -> dict[str, Any]:
    """Returns medians over fresh processes; the file is in the system's cache from the first on."""
    command = [sys.executable, "-m", "benchmarks.loading", "--here", model, *([dtype] if dtype else [])]
    runs = [
        json.loads(
            subprocess.run(
                command, env=worker_environment("plain"), stdout=subprocess.PIPE, text=True, check=True
            ).stdout
        )
        for _ in range(repeats)
    ]
    return runs[0] | {
        "load_s": statistics.median(run["load_s"] for run in runs),
        "peak_over_parameters": max(run["peak_over_parameters"] for run in runs),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[], help="known names, files or directories")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        print(json.dumps(load_here(args.here[0], *(args.here[1:] or [None]))))
        return
    cpus = pin_threads(args.threads)
    load = wait_until_quiet(cpus, 0.1, 60)
    record = {"benchmark": "loading", "environment": machine_record(args.threads, "plain")}
    record |= {"foreign_cores_before": None if load is None else round(load, 2), "results": []}
    with tempfile.TemporaryDirectory() as directory:
        models = args.models or [str(write_random_shards(Path(directory)))]
        for model in models:
            for dtype in args.dtypes:
                name = model if args.models else "random safetensors, 4 shards"
                record["results"].append(
                    {"model": name, "dtype": dtype} | measure(model, dtype, args.repeats)
                )
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
