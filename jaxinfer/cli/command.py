"""What a command is: a name, its options and what it does; one file a command holds one of these."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of `jaxinfer`.

    Attributes:
      name: as typed.
      summary: one line for the list of commands.
      add_options: declares its arguments.
      run: does it and returns the exit code; an exception becomes one line on stderr.
      uses_jax: it imports jax; the process is set up for that first.
    """

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    uses_jax: bool
