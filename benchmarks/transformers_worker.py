"""A contender: transformers on torch, with the weights that it dequantises from the same GGUF file.

Imports nothing of this library, so that it runs in an environment of its own. Also a program that prints
its first token, for the time from start to there: `python -m benchmarks.transformers_worker MODEL DTYPE ""
PROMPT`.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.worker import peak_bytes, serve

COMPILED = "compiled"


def set_threads() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_num_interop_threads(1)


def location(path: str) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` for a .gguf file or a directory."""
    file = Path(path)
    if file.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return {"pretrained_model_name_or_path": path}


def load_model(path: str, dtype: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(**location(path), dtype=getattr(torch, dtype))
    return model.eval()


class TransformersWorker:
    """One model and, from `decode_begin` to `decode_end`, one cache that holds a prompt.

    Args:
      mode: "" runs the model as it is, with its growing cache; "compiled" decodes through `torch.compile`
        with a static cache, and does nothing else.
    """

    def __init__(self, path: str, dtype: str, mode: str):
        began = time.perf_counter()
        self._model = load_model(path, dtype)
        self.load_s = time.perf_counter() - began
        # The argument was renamed in the course of transformers 5.
        names = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._compiled = torch.compile(self._model.forward, dynamic=False) if mode == COMPILED else None
        self._cache: Any = None
        self._first: torch.Tensor | None = None
        self._start = 0

    def facts(self) -> dict[str, Any]:
        config = self._model.config
        return {
            "load_s": self.load_s,
            "vocab_size": config.vocab_size,
            "max_positions": config.max_position_embeddings,
        }

    @torch.inference_mode()
    def prefill(self, tokens: list[int], runs: int) -> dict[str, Any]:
        """Returns the mean seconds from a prompt and an empty cache to the logits after it."""
        if self._compiled is not None:
            raise NotImplementedError("prefill is measured without torch.compile only")
        ids = torch.tensor([tokens])
        began = time.perf_counter()
        for _ in range(runs):
            logits, _ = self._step(self._model, ids, None)
        seconds = (time.perf_counter() - began) / runs
        return {"seconds": seconds, "tokens": [int(logits[0, -1].argmax())]}

    @torch.inference_mode()
    def decode_begin(self, tokens: list[int], batch: int, steps: int) -> dict[str, Any]:
        """Takes `batch` rows of the same prompt, with room for `steps` more tokens."""
        logits, cache = self._step(self._model, torch.tensor([tokens]), None)
        cache.batch_repeat_interleave(batch)
        self._first = logits[:, -1:].argmax(-1).repeat_interleave(batch, 0)
        self._start = len(tokens)
        self._cache = cache if self._compiled is None else self._static(cache, batch, len(tokens) + steps)
        return {}

    @torch.inference_mode()
    def decode(self, steps: int) -> dict[str, Any]:
        """Returns the seconds that `steps` tokens a row take, and row 0's; goes back to the prompt after."""
        step, cache = self._model, self._cache
        if self._compiled is None:
            cache = copy.deepcopy(cache)  # a growing cache cannot go back once a sliding layer is full
        else:
            step = self._compiled
            for layer in cache.layers:
                layer.cumulative_length.fill_(self._start)
        token, tokens = self._first, []
        began = time.perf_counter()
        for _ in range(steps):
            logits, cache = self._step(step, token, cache)
            token = logits[:, -1:].argmax(-1)
            tokens.append(token)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": [int(token[0, 0]) for token in tokens]}

    def decode_end(self) -> dict[str, Any]:
        self._cache = self._first = None
        return {}

    @torch.inference_mode()
    def generate(self, tokens: list[int], new_tokens: int) -> dict[str, Any]:
        ids = torch.tensor([tokens])
        answer = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
        )
        return {"tokens": answer[0, len(tokens) :].tolist()}

    def _step(self, forward: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        result = forward(input_ids=ids, **{self._cache_name: cache}, use_cache=True, logits_to_keep=1)
        return result.logits, result[self._cache_name]

    def _static(self, cache: Any, batch: int, length: int) -> Any:
        """Returns a static cache of `length` positions that holds what a growing one does."""
        if any(cache.is_sliding):
            raise NotImplementedError("the compiled mode serves models without sliding layers only")
        static = transformers.StaticCache(config=self._model.config, max_cache_len=length)
        self._step(self._model, torch.zeros(batch, 1, dtype=torch.long), static)  # allocates it
        for mine, theirs in zip(static.layers, cache.layers, strict=True):
            mine.keys[:, :, : self._start] = theirs.keys
            mine.values[:, :, : self._start] = theirs.values
        return static


def print_first_token(path: str, dtype: str, prompt: str) -> None:
    """Prints one JSON object as soon as the first token of the answer to a chat's first message is there."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(**location(path))
    model = load_model(path, dtype)
    if tokenizer.chat_template is None:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    else:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        token = int(model(input_ids=ids, logits_to_keep=1).logits[0, -1].argmax())
    record = {"text": tokenizer.decode([token]), "token_ids": [token], "num_prompt_tokens": ids.shape[1]}
    print(json.dumps(record), flush=True)


def main() -> None:
    path, dtype, mode, *prompt = sys.argv[1:]
    set_threads()
    if prompt:
        print_first_token(path, dtype, *prompt)
        return
    hello = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "imports_peak_bytes": peak_bytes(),
    }
    worker = TransformersWorker(path, dtype, mode)
    operations = {
        name: getattr(worker, name)
        for name in ("prefill", "decode_begin", "decode", "decode_end", "generate")
    }
    serve(hello | worker.facts(), operations | {"peak": lambda: {"peak_bytes": peak_bytes()}})


if __name__ == "__main__":
    main()
