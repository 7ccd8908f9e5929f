"""Tiny random models of each family, with logits that transformers computed for them.

A model is committed as `tiny/<name>/config.json`, `parameters.json` (tensor names, shapes and the
distribution each is drawn from) and `oracle.npz` (inputs, logits, greedy continuation). The weights are not
committed: each tensor is drawn from numpy's legacy `RandomState`, whose stream is frozen, seeded by the
CRC-32 of the tensor's name. `make_model_oracles.py` writes the files; this module needs neither torch nor
the packages under test.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import safetensors.numpy

ROOT = Path(__file__).parent / "tiny"

TEXT_ORACLES = (
    "llama",
    "llama_rope3",
    "mistral",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
IMAGE_ORACLES = ("gemma3", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
ORACLES = TEXT_ORACLES + IMAGE_ORACLES


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What transformers computed in float32 with eager attention.

    `inputs` holds `input_ids` int64 [1, T] and, for image models, what their processor would add:
    `pixel_values` float32, `image_grid_thw` int64 [images, 3], token type ids under the family's own name.
    """

    name: str
    config: dict  # config.json, parsed
    inputs: dict[str, np.ndarray]
    logits: np.ndarray  # float32 [T, V], over the prompt
    greedy_ids: np.ndarray  # int64 [16]: the greedy continuation; an end-of-text token does not stop it
    features: np.ndarray | None = None  # float32 [n, D]: the tower's, of all images one after another
    deepstack: np.ndarray | None = None  # float32 [j, n, D]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One tensor of a tiny checkpoint and how it is drawn.

    `first` and `second` are mean and standard deviation of a normal distribution, or the bounds of a uniform
    one.
    """

    name: str
    shape: tuple[int, ...]
    distribution: str  # "normal" | "uniform" | "log_of_uniform"
    first: float
    second: float

    def draw(self) -> np.ndarray:
        """The tensor, float32 [*shape]; the same on every call."""
        random = np.random.RandomState(zlib.crc32(self.name.encode()))
        if self.distribution == "normal":
            values = self.first + self.second * random.randn(*self.shape)
        elif self.distribution == "uniform":
            values = random.uniform(self.first, self.second, self.shape)
        elif self.distribution == "log_of_uniform":
            values = np.log(random.uniform(self.first, self.second, self.shape))
        else:
            raise ValueError(f"{self.name}: unknown distribution {self.distribution!r}")
        return np.asarray(values, np.float32)


def load_oracle(name: str, *, edges: bool = False) -> Oracle:
    """The committed oracle `name`, one of `ORACLES`.

    `edges`: the second prompt of one of `IMAGE_ORACLES`, images at its start and end; no greedy continuation.
    """
    with np.load(ROOT / name / "oracle.npz") as stored:
        arrays = dict(stored)
    if edges:
        arrays = {key.removeprefix("edges."): arrays[key] for key in arrays if key.startswith("edges.")}
    inputs = {key.removeprefix("in_"): value for key, value in arrays.items() if key.startswith("in_")}
    if "pixel_seed" in arrays:
        inputs["pixel_values"] = draw_pixels(int(arrays["pixel_seed"]), tuple(arrays["pixel_shape"]))
    config = json.loads((ROOT / name / "config.json").read_text())
    greedy_ids = arrays.get("greedy_ids", np.zeros(0, np.int64))
    towers = (arrays.get("features"), arrays.get("deepstack"))
    return Oracle(name, config, inputs, arrays["logits"], greedy_ids, *towers)


def draw_pixels(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Preprocessed pixels, float32 [*shape] in [-1, 1)."""
    return np.random.RandomState(seed).uniform(-1, 1, shape).astype(np.float32)


def tiny_parameters(name: str) -> tuple[Parameter, ...]:
    """The tensors of checkpoint `name` in sorted order."""
    rows = json.loads((ROOT / name / "parameters.json").read_text())["parameters"]
    return tuple(Parameter(row[0], tuple(row[1]), *row[2:]) for row in rows)


def tiny_weights(name: str) -> dict[str, np.ndarray]:
    """The weights of checkpoint `name`: tensor name on disk -> float32 array."""
    return {parameter.name: parameter.draw() for parameter in tiny_parameters(name)}


def weights_digest(weights: dict[str, np.ndarray]) -> str:
    """SHA-256 over names, shapes and bytes, in sorted order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}{weights[name].shape}".encode())
        digest.update(np.ascontiguousarray(weights[name]).tobytes())
    return digest.hexdigest()


def recorded_digest(name: str) -> str:
    """The digest of the weights that transformers was given when the oracle was made."""
    return json.loads((ROOT / name / "parameters.json").read_text())["weights_sha256"]


def write_checkpoint(name: str, directory: Path, *, weights: dict[str, np.ndarray] | None = None) -> Path:
    """Writes `config.json` and `model.safetensors` into `directory`, which is made; returns it.

    `weights` replaces `tiny_weights(name)`, for tests that rename, drop or change a tensor.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text((ROOT / name / "config.json").read_text())
    tensors = tiny_weights(name) if weights is None else weights
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
