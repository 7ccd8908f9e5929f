"""A contender: llama.cpp by llama-cpp-python's low-level interface, with the weights as the file has them.

Imports nothing of this library, so that it runs in an environment of its own. Also a program that prints
its first token, for the time from start to there: `python -m benchmarks.llama_cpp_worker MODEL PROMPT`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.worker import peak_bytes, serve

_MICRO_BATCH = 512  # llama.cpp's own default
_CELLS = 256  # a context's length is a multiple of this


def num_threads() -> int:
    return len(os.sched_getaffinity(0))


def build() -> str:
    """Returns what the library was built for, as far as it matters here."""
    said = llama_cpp.llama_print_system_info().decode()
    on = {
        part.split("=")[0].split(":")[-1].strip() for part in said.split("|") if part.strip().endswith("= 1")
    }
    units = [name for name in ("AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16") if name in on]
    return ", ".join([*units, "with AMX" if "AMX_INT8" in on else "without AMX"])


class LlamaCppWorker:
    """One model and, from `decode_begin` to `decode_end`, a context with a prompt in each sequence."""

    def __init__(self, path: str):
        began = time.perf_counter()
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the model")
        self.load_s = time.perf_counter() - began
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._context: Any = None
        self._start = 0
        self._first: list[int] = []

    def facts(self) -> dict[str, Any]:
        return {
            "load_s": self.load_s,
            "vocab_size": self._vocab_size,
            "max_positions": llama_cpp.llama_model_n_ctx_train(self._model),
        }

    def prefill(self, tokens: list[int], runs: int) -> dict[str, Any]:
        """Returns the mean seconds from a prompt and an empty context to the logits after it."""
        self._open(len(tokens), 1)
        seconds, token = 0.0, 0
        for _ in range(runs):
            llama_cpp.llama_memory_clear(self._memory, False)
            began = time.perf_counter()
            token = self._read(tokens)
            seconds += time.perf_counter() - began
        self._close()
        return {"seconds": seconds / runs, "tokens": [token]}

    def decode_begin(self, tokens: list[int], batch: int, steps: int) -> dict[str, Any]:
        """Takes `batch` sequences of the same prompt, with room for `steps` more tokens."""
        self._open(len(tokens) + steps, batch)
        self._first = [self._read(tokens)] * batch
        for sequence in range(1, batch):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        self._start = len(tokens)
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Returns the seconds that `steps` tokens a sequence take, and the first's; goes back after."""
        token, found = self._first, []
        began = time.perf_counter()
        for step in range(steps):
            token = self._step(token, self._start + step)
            found.append(token[0])
        seconds = time.perf_counter() - began
        for sequence in range(len(token)):
            if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, self._start, -1):
                raise RuntimeError("llama.cpp cannot take the tokens back")
        return {"seconds": seconds, "tokens": found}

    def decode_end(self) -> dict[str, Any]:
        self._close()
        return {}

    def generate(self, tokens: list[int], new_tokens: int) -> dict[str, Any]:
        self._open(len(tokens) + new_tokens, 1)
        found = [self._read(tokens)]
        while len(found) < new_tokens:
            found += self._step(found[-1:], len(tokens) + len(found) - 1)
        self._close()
        return {"tokens": found}

    def _open(self, positions: int, sequences: int) -> None:
        self._close()
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = sequences * (-(-positions // _CELLS) * _CELLS)
        options.n_batch, options.n_ubatch, options.n_seq_max = (
            max(positions, sequences),
            _MICRO_BATCH,
            sequences,
        )
        options.n_threads = options.n_threads_batch = num_threads()
        options.swa_full = False  # sliding layers keep what they read, as in llama.cpp's own programs
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(max(positions, sequences), 0, 1)

    def _close(self) -> None:
        if self._context is not None:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self._context)
            self._context = None

    def _read(self, tokens: list[int]) -> int:
        """Reads a prompt into sequence 0 and returns the token after it."""
        for index, token in enumerate(tokens):
            self._put(index, token, position=index, sequence=0, wants_logits=index == len(tokens) - 1)
        self._run(len(tokens))
        return self._greedy(len(tokens) - 1)

    def _step(self, tokens: list[int], position: int) -> list[int]:
        """Feeds one token a sequence and returns the next ones."""
        for sequence, token in enumerate(tokens):
            self._put(sequence, token, position=position, sequence=sequence, wants_logits=True)
        self._run(len(tokens))
        return [self._greedy(sequence) for sequence in range(len(tokens))]

    def _put(self, index: int, token: int, *, position: int, sequence: int, wants_logits: bool) -> None:
        batch = self._batch
        batch.token[index], batch.pos[index], batch.logits[index] = token, position, wants_logits
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence

    def _run(self, count: int) -> None:
        self._batch.n_tokens = count
        if code := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def _greedy(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def print_first_token(path: str, prompt: str) -> None:
    """Prints one JSON object as soon as the first token of the answer to a chat's first message is there."""
    threads = num_threads()
    model = llama_cpp.Llama(path, n_ctx=_CELLS, n_threads=threads, n_threads_batch=threads, verbose=False)
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
    if "tokenizer.chat_template" in model.metadata:
        messages = [{"role": "user", "content": prompt}]
        answer: Any = model.create_chat_completion(messages, **options)
        text = answer["choices"][0]["message"]["content"]
    else:
        answer = model.create_completion(prompt, **options)
        text = answer["choices"][0]["text"]
    record = {"text": text, "num_prompt_tokens": answer["usage"]["prompt_tokens"]}
    print(json.dumps(record), flush=True)


def main() -> None:
    path, *prompt = sys.argv[1:]
    if prompt:
        print_first_token(path, *prompt)
        return
    hello = {
        "versions": {"llama-cpp-python": llama_cpp.__version__},
        "build": build(),
        "imports_peak_bytes": peak_bytes(),
    }
    worker = LlamaCppWorker(path)
    operations = {
        name: getattr(worker, name)
        for name in ("prefill", "decode_begin", "decode", "decode_end", "generate")
    }
    serve(hello | worker.facts(), operations | {"peak": lambda: {"peak_bytes": peak_bytes()}})


if __name__ == "__main__":
    main()
