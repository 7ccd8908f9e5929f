"""The worker's side of a contender: answers requests, one JSON object a line, until its input ends.

Imports neither jax nor torch, so that a worker of any library can use it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def serve(hello: Mapping[str, Any], operations: Mapping[str, Callable[..., Mapping[str, Any]]]) -> None:
    """Sends `hello`, then answers `{"op": name, **arguments}` with what the operation returns.

    An operation that raises is answered with `{"error": ...}`; the traceback goes to stderr. Whatever else
    is printed goes to stderr too, so that it cannot get between the answers.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _send(answers, hello)
        for line in sys.stdin:
            request = json.loads(line)
            name = request.pop("op")
            try:
                if name not in operations:
                    raise ValueError(f"this worker has no operation {name!r}")
                answer = operations[name](**request)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            _send(answers, answer)


def _send(answers: Any, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def peak_bytes() -> int | None:
    """Returns the most memory that this process has had resident, None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
