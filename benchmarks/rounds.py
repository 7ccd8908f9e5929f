"""Interleaved measuring: in every round each contender runs once, alone, the others idle.

So drift of the machine meets all of them, and a ratio is the median of ratios within a round.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.contender import Contender, ContenderError
from benchmarks.machine import Load, LoadMeter

_SETTLE_S = 0.25  # for the threads of whoever ran before to go to sleep
_FEWEST_ROUNDS = 3
_SLOWEST_WARM_UPS = 600  # seconds: compiles


@dataclasses.dataclass(frozen=True)
class Conditions:
    """How measurements are made.

    Attributes:
      cpus: that the contenders run on.
      repeats: rounds.
      cell_s: a measurement ends after this long, though not before three rounds.
      max_foreign_load: cores that others may use; a sample with more is taken again, at most twice.
      is_forced: take every sample as it comes.
    """

    cpus: tuple[int, ...]
    repeats: int
    cell_s: float
    max_foreign_load: float
    is_forced: bool


@dataclasses.dataclass(frozen=True)
class Sample:
    """One timed run; its tokens show that all contenders compute the same."""

    seconds: float
    tokens: tuple[int, ...]
    load: Load


@dataclasses.dataclass(frozen=True)
class Measured:
    """One contender's samples of one measurement, a round each.

    Attributes:
      first_s: of the run before the rounds, which compiles.
      failure: why there are none, "" where there are.
    """

    samples: tuple[Sample, ...] = ()
    first_s: float = 0.0
    failure: str = ""

    @property
    def median_s(self) -> float:
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def foreign_load(self) -> float | None:
        """Cores that others used over all samples; None where the system does not say."""
        loads = [sample.load for sample in self.samples]
        if any(load.foreign_s is None for load in loads):
            return None
        return sum(load.foreign_s for load in loads) / sum(load.wall_s for load in loads)


def measure(
    contenders: Sequence[Contender], op: str, arguments: dict[str, Any], conditions: Conditions
) -> dict[str, Measured]:
    """Returns what each contender that is alive makes of a request, by its name."""
    found: dict[str, list[Sample]] = {}
    first: dict[str, float] = {}
    failures: dict[str, str] = {}
    alive = []
    for contender in contenders:
        name = contender.entry.name
        try:
            answer = contender.request(op, timeout_s=_SLOWEST_WARM_UPS, **arguments)
            first[name], found[name] = answer["seconds"], []
            alive.append(contender)
        except ContenderError as error:
            failures[name] = str(error)
    began = time.perf_counter()
    for index in range(conditions.repeats):
        if index >= _FEWEST_ROUNDS and time.perf_counter() - began > conditions.cell_s:
            break
        for contender in alive if index % 2 == 0 else reversed(alive):
            if contender.entry.name not in failures:
                try:
                    found[contender.entry.name].append(_quiet_sample(contender, op, arguments, conditions))
                except ContenderError as error:
                    failures[contender.entry.name] = str(error)
    return {
        name: Measured(failure=failures[name])
        if name in failures
        else Measured(tuple(found[name]), first[name])
        for name in (contender.entry.name for contender in contenders)
    }


def ratio(peer: Measured, own: Measured) -> float:
    """Returns how many times as fast `own` is, the median over rounds."""
    pairs = zip(peer.samples, own.samples, strict=False)  # both begin with round 0
    return statistics.median(theirs.seconds / mine.seconds for theirs, mine in pairs)


def _quiet_sample(contender: Contender, op: str, arguments: dict[str, Any], conditions: Conditions) -> Sample:
    """Returns a sample; one that others disturbed is taken again, and the least disturbed one kept."""
    tries = []
    for _ in range(1 if conditions.is_forced else 3):
        time.sleep(_SETTLE_S)
        meter = LoadMeter(conditions.cpus, [contender.pid])
        answer = contender.request(op, **arguments)
        sample = Sample(answer["seconds"], tuple(answer["tokens"]), meter.read())
        if not sample.load.exceeds(conditions.max_foreign_load):
            return sample
        tries.append(sample)
    return min(tries, key=lambda sample: (sample.load.foreign_s or 0) / sample.load.wall_s)
