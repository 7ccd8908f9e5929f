"""Writes what transformers reads from the known models' GGUF files into `tests/loading/fixtures/`.

    python -m tests.oracles.make_gguf_oracles

Needs the `peers` extra and both models pulled. Of each tensor a few rows are kept, chosen by the name's
CRC-32, and the sum of all values; of the config, what shapes the computation.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

from jaxinfer.loading import resolve

FIXTURES = Path(__file__).parent.parent / "loading" / "fixtures"
LAYERS = (0, 5, 17)
CONFIG_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "vocab_size",
)


def sampled(name: str, shape: tuple[int, ...]) -> list[int]:
    """Two rows of a tensor: any two would do, these are the same for every reader."""
    seed = zlib.crc32(name.encode())
    return [seed % shape[0], seed // 7 % shape[0]]


def main() -> None:
    for known in ("smollm2-135m", "gemma3-270m"):
        path = resolve(known)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
        tensors = {}
        for name, tensor in model.state_dict().items():
            parts = name.split(".")
            if name == "lm_head.weight" or (parts[1] == "layers" and int(parts[2]) not in LAYERS):
                continue
            values = tensor.numpy()
            rows = sampled(name, values.shape)
            tensors[name] = {
                "shape": values.shape,
                "rows": {row: [float(f"{x:.9g}") for x in np.atleast_1d(values[row])[:12]] for row in rows},
                "sum": float(values.sum(dtype=np.float64)),
            }
        config = model.config.to_dict()
        made = {"config": {key: config[key] for key in CONFIG_KEYS}, "tensors": tensors}
        made["config"]["layer_types"] = config.get("layer_types")
        out = FIXTURES / f"tensors-{known}.json"
        out.write_text(json.dumps(made, separators=(",", ":")) + "\n")
        print(f"{out}: {len(tensors)} tensors")


if __name__ == "__main__":
    main()
