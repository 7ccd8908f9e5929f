"""Who is measured: this library and its peers, each in an environment of its own, and how each is started."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contender import Entry
from benchmarks.machine import ROOT, worker_environment
from benchmarks.start_up import PROMPT

OWN = "jaxinfer"
TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
PEER_DTYPES = ("bfloat16", "float32")
_NEEDS = {TRANSFORMERS: ("torch", "transformers"), LLAMA_CPP: ("llama_cpp",)}
_EXTRAS = {TRANSFORMERS: "peers", LLAMA_CPP: "llama-cpp"}
_OPTIONS = {TRANSFORMERS: "--peer-python", LLAMA_CPP: "--llama-python"}


class ModelFile:
    """The model as each side takes it; `name` and `file` say which it is without saying where.

    Args:
      argument: a known name, a .gguf file or a directory.
      converted: a directory with the same weights for transformers, which needs half a minute to take a
        GGUF file apart; None: it reads the file.
    """

    def __init__(self, argument: str, converted: str | None):
        from jaxinfer.loading import resolve

        self.argument = argument
        self.path = str(resolve(argument).resolve())
        self.file = Path(self.path).name
        self.name = argument if argument == Path(argument).name else self.file
        self.converted = converted

    @property
    def quantization(self) -> str:
        """How a GGUF file keeps most of its weights, such as "Q4_1"."""
        import gguf

        field = gguf.GGUFReader(self.path).fields["general.file_type"]
        return gguf.LlamaFileType(int(field.contents())).name.removeprefix("MOSTLY_")


@dataclasses.dataclass(frozen=True)
class Peers:
    """The peers of one run.

    Attributes:
      pythons: the interpreter of each, by name.
      modes: of transformers, "" for eager.
      dtypes: of transformers' weights.
    """

    pythons: dict[str, str]
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]

    @classmethod
    def checked(cls, args: argparse.Namespace) -> Peers:
        """Ends the run where a peer cannot be imported: an hour later would be late."""
        asked = {TRANSFORMERS: args.peer_python, LLAMA_CPP: args.llama_python}
        pythons = {name: _python(name, asked[name]) for name in args.peers}
        return cls(
            pythons, tuple("" if m == "eager" else m for m in args.peer_modes), tuple(args.peer_dtypes)
        )

    def entries(self, model: ModelFile) -> list[Entry]:
        """Returns transformers in each dtype and mode, and llama.cpp, which takes a file as it is."""
        found = []
        if TRANSFORMERS in self.pythons:
            found += [Entry(TRANSFORMERS, dtype, mode) for dtype in self.dtypes for mode in self.modes]
        if LLAMA_CPP in self.pythons:
            found.append(Entry(LLAMA_CPP, model.quantization))
        return found

    def command(self, entry: Entry, model: ModelFile) -> list[str]:
        """Returns the command of an entry's worker."""
        if entry.library == OWN:
            return [
                sys.executable,
                "-m",
                "benchmarks.jaxinfer_worker",
                model.argument,
                entry.dtype,
                entry.mode,
            ]
        python = self.pythons[entry.library]
        if entry.library == LLAMA_CPP:
            return [python, "-m", "benchmarks.llama_cpp_worker", model.path]
        path = model.converted or model.path
        return [python, "-m", "benchmarks.transformers_worker", path, entry.dtype, entry.mode]

    def starts(self, model: ModelFile, dtype: str) -> dict[str, Sequence[str]]:
        """Returns commands that print their first token, by name; transformers in our dtype if it can."""
        wanted = dtype if dtype in self.dtypes else next(iter(self.dtypes), "")
        return {
            entry.name: [*self.command(entry, model), PROMPT]
            for entry in self.entries(model)
            if not entry.mode and entry.dtype in (wanted, model.quantization)
        }


def _python(name: str, asked: str | None) -> str:
    if asked is None:
        if any(importlib.util.find_spec(module) is None for module in _NEEDS[name]):
            raise SystemExit(
                f"{name} is not installed here: install the extra `{_EXTRAS[name]}`, name another "
                f"environment with {_OPTIONS[name]}, or run without it: --peers names the ones to measure"
            )
        return sys.executable
    command = [asked, "-c", f"import {', '.join(_NEEDS[name])}"]
    found = subprocess.run(command, capture_output=True, text=True, env=worker_environment("plain"), cwd=ROOT)
    if found.returncode != 0:
        raise SystemExit(f"{_OPTIONS[name]} cannot import {name}: {found.stderr[-500:].strip()}")
    return asked
