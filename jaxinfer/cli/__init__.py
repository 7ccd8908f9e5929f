"""The command `jaxinfer`: one file a command, listed in `program`.

Nothing here imports jax, or a part of the library that does, before it has to: help, wrong arguments and
`pull` answer without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxinfer.cli.interrupts import leave, watch_for_interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0; 1 for a failure; 2 for bad use; 130 after Ctrl-C; 141 when whoever read the output is gone. Whatever
    goes wrong is one line on stderr.

    Args:
      argv: the arguments. None takes the process's own, and sets the process up for one command (signals,
        memory, jax's settings); given ones leave the process as it is.
    """
    if argv is not None:
        from jaxinfer.cli.program import run

        return run(argv, is_program=False)
    watch_for_interrupts()
    try:
        # Inside, because these imports take long enough to be interrupted.
        from jaxinfer.cli.program import run_program

        return run_program()
    except KeyboardInterrupt:
        print("jaxinfer: interrupted", file=sys.stderr)
        leave(130)
