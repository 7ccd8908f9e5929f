"""What jax compiles in this process, and how long it takes."""

from __future__ import annotations

from typing import Any

import jax.monitoring

from jaxinfer.generation import traces

_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}


class CompileLedger:
    """Counts from its creation on; `close` ends it.

    A program that comes from the persistent cache counts, with the time of reading it.
    """

    def __init__(self) -> None:
        self._programs = 0
        self._seconds = dict.fromkeys(_STAGES.values(), 0.0)
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._count)

    def record(self) -> dict[str, Any]:
        """Returns the programs compiled, the seconds by stage, and the library's own traces by function."""
        seconds = {stage: round(value, 3) for stage, value in self._seconds.items()}
        return {"programs": self._programs, **seconds, "traces": traces()}

    def _count(self, event: str, duration_secs: float, **unused: str | int) -> None:
        if stage := _STAGES.get(event):
            self._seconds[stage] += duration_secs
            self._programs += stage == "compile_s"
