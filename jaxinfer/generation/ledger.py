"""How often each compiled function was traced in this process.

A trace is a Python call of the function's body, so counting there is exact: a call that finds its program
compiled does not run the body. Shapes come from declared buckets, so these counts are bounded, and a test
holds that.
"""

from __future__ import annotations

import collections

_TRACES: collections.Counter[str] = collections.Counter()


def count_trace(function: str) -> None:
    """Counts one trace of `function`; called first in the body of a jitted function."""
    _TRACES[function] += 1


def traces() -> dict[str, int]:
    """Returns the number of traces so far by function name."""
    return dict(_TRACES)
