"""What transformers says of real weights for a few prompts: enough of the logits to tell any fault.

The full logits of a prompt would be hundreds of megabytes. Kept are, at every position, the argmax and the
logits of 64 fixed vocabulary ids; at up to eight positions, the last one among them, the 32 greatest logits;
and a greedy continuation. `make_real_oracles.py` writes the files; this module needs numpy alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent / "real"
LICENSE = Path(__file__).parents[2] / "LICENSE"  # a long text that is at hand

TOP = 32
SAMPLED_POSITIONS = 8
NEW_TOKENS = 64


def _columns(vocab_size: int) -> np.ndarray:
    return np.sort(np.random.RandomState(0).choice(vocab_size, 64, replace=False))


# The fixed vocabulary ids, by transformers' name of the family.
COLUMNS = {"llama": _columns(49_152), "gemma3_text": _columns(262_144)}
FAMILIES = {"smollm2-135m": "llama", "gemma3-270m": "gemma3_text"}


@dataclasses.dataclass(frozen=True)
class RealOracle:
    """One prompt of T tokens; P = min(T, 8) positions are looked at closely."""

    prompt: str | list[dict[str, str]]  # raw text, or the messages of a chat that asks for a reply
    ids: np.ndarray  # int32 [T]
    columns: np.ndarray  # int64 [64], vocabulary ids
    column_logits: np.ndarray  # float32 [T, 64]
    argmax_ids: np.ndarray  # int32 [T]
    argmax_gaps: np.ndarray  # float32 [T], between the two greatest logits
    positions: np.ndarray  # int64 [P], ascending, the last is T - 1
    top_ids: np.ndarray  # int32 [P, 32], by descending logit
    top_logits: np.ndarray  # float32 [P, 32]
    greedy_ids: np.ndarray  # int32 [64]; an end-of-text token does not stop it
    greedy_gaps: np.ndarray  # float32 [64]


def sampled_positions(length: int) -> np.ndarray:
    """Up to eight positions spread over a prompt, the last one among them."""
    return np.unique(np.linspace(0, length - 1, SAMPLED_POSITIONS).astype(np.int64))


def prompts(name: str) -> list[str | list[dict[str, str]]]:
    """The prompts of a known model: raw texts and, where it was trained for them, chats."""
    licence = LICENSE.read_text()
    if name == "gemma3-270m":
        return [
            "The capital of France is",
            "def fibonacci(n):\n    if n < 2:\n        return n\n",
            "Die Würde des Menschen ist unantastbar. 日本の首都は東京です。",
            "Recipe: pancakes\n\nIngredients:\n- 2 eggs\n- 250 ml milk\n-",
            licence.lstrip()[:5600],  # more than 1,000 tokens, past two windows of 512
        ]
    return [
        "The capital of France is",
        [dict(role="user", content="What is the capital of France?")],
        "def fibonacci(n):\n    if n < 2:\n        return n\n",
        [
            dict(role="system", content="You answer in one short sentence."),
            dict(role="user", content="Why is the sky blue?"),
            dict(role="assistant", content="Air scatters blue light more than red light."),
            dict(role="user", content="And why are sunsets red?"),
        ],
        licence[:3000],
    ]


def load_real_oracles(name: str) -> list[RealOracle]:
    """The oracles of a known model, one a prompt."""
    with np.load(ROOT / f"{name}.npz") as stored:
        arrays = dict(stored)
    columns = COLUMNS[FAMILIES[name]]
    oracles = []
    for index, prompt in enumerate(prompts(name)):
        prefix = f"{index}."
        kept = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        positions = sampled_positions(len(kept["ids"]))
        oracles.append(RealOracle(prompt=prompt, columns=columns, positions=positions, **kept))
    return oracles
