"""Writes `real/<model>.npz` from real weights; needs the `peers` extra, 4 GiB of memory and some minutes.

    python -m tests.oracles.make_real_oracles smollm2-135m PATH.gguf
    python -m tests.oracles.make_real_oracles gemma3-270m PATH.gguf

transformers reads the GGUF file itself, so the logits are those of the same dequantised float32 weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import regex
import torch
import transformers

from tests.oracles.real_models import COLUMNS, NEW_TOKENS, ROOT, TOP, prompts, sampled_positions

ROWS_AT_ONCE = 64  # logits of a quarter million tokens are a megabyte a row


def encode(tokenizer, prompt: str | list[dict[str, str]], *, splits_digits: bool) -> list[int]:
    """Token ids of raw text (with the model's own BOS, where it has one) or of a chat.

    `splits_digits`: transformers does not know that SmolLM2's pre-tokenizer sets every digit apart.
    """
    if isinstance(prompt, str) and not splits_digits:
        return tokenizer(prompt).input_ids
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    parts = [part for part in regex.split(r"(\p{N})", prompt) if part]
    return [index for part in parts for index in tokenizer(part, add_special_tokens=False).input_ids]


@torch.no_grad()
def prompt_logits(model, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """What `real_models.RealOracle` keeps of the logits of one prompt."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
    kept = sampled_positions(len(hidden))
    columns, best, gaps, top_ids, top_logits = [], [], [], [], []
    for start in range(0, len(hidden), ROWS_AT_ONCE):
        logits = model.lm_head(hidden[start : start + ROWS_AT_ONCE])
        two = logits.topk(2)
        columns.append(logits[:, COLUMNS[model.config.model_type]])
        best.append(two.indices[:, 0])
        gaps.append(two.values[:, 0] - two.values[:, 1])
        for position in kept[(kept >= start) & (kept < start + ROWS_AT_ONCE)]:
            top = logits[position - start].topk(TOP)
            top_ids.append(top.indices)
            top_logits.append(top.values)
    return {
        "column_logits": torch.cat(columns).numpy(),
        "argmax_ids": torch.cat(best).numpy().astype(np.int32),
        "argmax_gaps": torch.cat(gaps).numpy(),
        "top_ids": torch.stack(top_ids).numpy().astype(np.int32),
        "top_logits": torch.stack(top_logits).numpy(),
    }


@torch.no_grad()
def greedy(model, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """The greedy continuation and, a step, how far apart the two best logits were."""
    model.generation_config.eos_token_id = None
    result = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(result.logits, 1)[0].topk(2).values
    return {
        "greedy_ids": result.sequences[0, ids.shape[1] :].numpy().astype(np.int32),
        "greedy_gaps": (best[:, 0] - best[:, 1]).numpy(),
    }


def main(name: str, path: Path) -> None:
    """Writes the oracle of one known model."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the same sums on every machine, and no waiting on a busy one
    torch.set_float32_matmul_precision("highest")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    arrays = {}
    for index, prompt in enumerate(prompts(name)):
        ids = torch.tensor([encode(tokenizer, prompt, splits_digits=name.startswith("smollm2"))])
        stored = {"ids": ids[0].numpy().astype(np.int32), **prompt_logits(model, ids), **greedy(model, ids)}
        arrays |= {f"{index}.{key}": value for key, value in stored.items()}
        text = tokenizer.decode(stored["greedy_ids"])
        print(
            f"{name} {index}: {ids.shape[1]} tokens, least gaps {stored['argmax_gaps'].min():.4f} over the "
            f"prompt, {stored['greedy_gaps'].min():.4f} greedy: {json.dumps(text)}",
            flush=True,
        )
    ROOT.mkdir(exist_ok=True)
    np.savez_compressed(ROOT / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
