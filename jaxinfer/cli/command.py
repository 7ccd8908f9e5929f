"""What a command is: one line in `program.COMMANDS`, and a file of its name."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from typing import Protocol


class CommandModule(Protocol):
    """What `jaxinfer/cli/<name>.py` holds; imported when that command is the one to run."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declares the arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Does it and returns the exit code; an exception becomes one line on stderr."""
        ...


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of `jaxinfer`.

    Attributes:
      name: as typed, and of its file.
      summary: one line for the list of commands.
      uses_jax: the process is set up for jax first.
    """

    name: str
    summary: str
    uses_jax: bool

    def load(self) -> CommandModule:
        """Returns the command's module."""
        return importlib.import_module(f"jaxinfer.cli.{self.name}")  # type: ignore[return-value]
