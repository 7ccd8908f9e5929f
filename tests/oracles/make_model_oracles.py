"""Writes the tiny oracles under `tiny/`; needs the `peers` extra (torch, transformers) and half a minute.

    python -m tests.oracles.make_model_oracles [NAME ...]

A model is made from a small config and its tensors are listed as transformers saves them. The weights are
drawn by `tiny_checkpoints`, written as a checkpoint and read back by transformers, which then computes the
logits. So what is committed is the answer to exactly the checkpoint that tests rebuild.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from tests.oracles import tiny_checkpoints
from tests.oracles.tiny_checkpoints import Parameter, draw_pixels
from tests.oracles.tiny_configs import FAMILIES, Edges, Family

NEW_TOKENS = 16


def describe(name: str, initial: np.ndarray, family: Family) -> Parameter:
    """The distribution of one tensor: activations stay near one, nothing keeps its trivial initial value."""
    if name.endswith("A_log"):
        rule = ("log_of_uniform", 0.05, 4.0)
    elif name.endswith("dt_bias"):
        rule = ("uniform", -2.0, 1.0)
    elif "conv1d" in name:
        rule = ("uniform", -0.6, 0.6)
    elif name.endswith("model.norm.weight"):
        rule = ("normal", float(np.all(initial == 1)) + family.final_norm_gain - 1, 0.2)
    elif initial.ndim == 1:  # norm scales start at one (or at zero, where one is added), biases at zero
        rule = ("normal", float(np.all(initial == 1)), 0.2)
    elif "pos_embed" in name or "position_embedding" in name:
        rule = ("normal", 0.0, 0.3)
    elif "embed_tokens" in name:
        rule = ("normal", 0.0, family.embedding_std)
    elif name.endswith("lm_head.weight"):
        rule = ("normal", 0.0, family.head_gain / initial.shape[-1] ** 0.5)
    else:
        transposed = name.endswith(
            "mm_input_projection_weight"
        )  # [in, out], every other matrix is [out, in...]
        stacked = "experts." in name and initial.ndim == 3  # [experts, out, in]
        fan_in = (
            initial.shape[0]
            if transposed
            else initial.shape[-1]
            if stacked
            else int(np.prod(initial.shape[1:]))
        )
        rule = ("normal", 0.0, 1.2 / fan_in**0.5)
    return Parameter(name, initial.shape, *rule)


def write_description(name: str, family: Family) -> None:
    """Writes config.json and parameters.json of one model."""
    target = tiny_checkpoints.ROOT / name
    target.mkdir(parents=True, exist_ok=True)
    model_class = getattr(transformers, family.model_class)
    config = getattr(transformers, family.config_class)(**copy.deepcopy(family.config))
    with tempfile.TemporaryDirectory() as saved:
        model_class(config).float().save_pretrained(saved)
        shutil.copy(Path(saved) / "config.json", target / "config.json")
        initial = load_file(Path(saved) / "model.safetensors")
    parameters = [describe(key, initial[key], family) for key in sorted(initial)]
    digest = tiny_checkpoints.weights_digest({parameter.name: parameter.draw() for parameter in parameters})
    rows = [json.dumps([p.name, list(p.shape), p.distribution, p.first, p.second]) for p in parameters]
    lines = ['{"weights_sha256": "' + digest + '",', ' "parameters": [', "  " + ",\n  ".join(rows), "]}"]
    (target / "parameters.json").write_text("\n".join(lines) + "\n")


def load_model(name: str, directory: Path) -> torch.nn.Module:
    """The rebuilt checkpoint as transformers reads it; a tensor that does not fit is an error."""
    tiny_checkpoints.write_checkpoint(name, directory)
    model, report = getattr(transformers, FAMILIES[name].model_class).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: value for key, value in report.items() if value}
    if wrong:
        raise ValueError(f"{name}: the rebuilt checkpoint does not load cleanly: {wrong}")
    return model.eval()


def model_inputs(prompt: Family | Edges) -> dict[str, torch.Tensor]:
    """What the model's forward takes, pixels included."""
    inputs = {key: torch.from_numpy(value) for key, value in prompt.inputs.items()}
    if prompt.pixel_seed is not None:
        inputs["pixel_values"] = torch.from_numpy(draw_pixels(prompt.pixel_seed, prompt.pixel_shape))
    return inputs


@torch.no_grad()
def image_arrays(model: torch.nn.Module, prompt: Family | Edges) -> dict[str, np.ndarray]:
    """What a prompt is stored as and, for an image model, what its tower alone gives: features [n, D] of all
    images one after another, deepstack features [j, n, D] where the model has them."""
    arrays = {f"in_{key}": value for key, value in prompt.inputs.items()}
    if prompt.pixel_seed is None:
        return arrays
    arrays |= {"pixel_seed": np.int64(prompt.pixel_seed), "pixel_shape": np.int64(prompt.pixel_shape)}
    inputs = model_inputs(prompt)
    grids = {key: value for key, value in inputs.items() if key == "image_grid_thw"}
    tower = model.get_image_features(inputs["pixel_values"], **grids)
    features = tower.pooler_output
    features = torch.cat(tuple(features)) if not isinstance(features, torch.Tensor) else features
    arrays["features"] = features.reshape(-1, features.shape[-1]).numpy()
    if stack := getattr(tower, "deepstack_features", None):
        arrays["deepstack"] = np.stack([torch.cat(tuple(layer)).numpy() for layer in stack])
    return arrays


@torch.no_grad()
def compute(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray, float]:
    """Logits float32 [T, V], greedy ids [NEW_TOKENS], and the least gap of a step's two best logits."""
    logits = model(**inputs, use_cache=False).logits[0].numpy()
    model.generation_config.eos_token_id = None
    result = model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    best = torch.stack(result.logits, 1)[0].topk(2).values
    return logits, result.sequences[0, -NEW_TOKENS:].numpy(), float((best[:, 0] - best[:, 1]).min())


def write_oracle(name: str) -> None:
    """Writes the three files of one model and prints what to look at."""
    family = FAMILIES[name]
    write_description(name, family)
    with tempfile.TemporaryDirectory() as directory:
        model = load_model(name, Path(directory))
    logits, greedy_ids, margin = compute(model, model_inputs(family))
    arrays = image_arrays(model, family)
    if family.edges is not None:
        edges = image_arrays(model, family.edges)
        with torch.no_grad():
            edges["logits"] = model(**model_inputs(family.edges), use_cache=False).logits[0].numpy()
        arrays |= {f"edges.{key}": value for key, value in edges.items()}
    target = tiny_checkpoints.ROOT / name / "oracle.npz"
    np.savez_compressed(target, logits=logits, greedy_ids=greedy_ids, **arrays)
    print(
        f"{name:17s} logits {logits.shape} std {logits.std():.2f}, least greedy gap {margin:.4f}, "
        f"{sum(f.stat().st_size for f in target.parent.iterdir()) / 1024:.0f} KiB, "
        f"greedy {greedy_ids.tolist()}"
    )


def main(names: list[str]) -> None:
    """Writes the named oracles, or all of them."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    for name in names or tiny_checkpoints.ORACLES:
        write_oracle(name)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main(sys.argv[1:])
