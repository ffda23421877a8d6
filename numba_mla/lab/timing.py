"""Times of calls that are measured in turns, so that a busy moment of the machine meets all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep

from ..machine import Yardstick
from ..parallel import num_threads, threads

# A pool of threads may spin for a while after a call; a slice of the peak must not share the cores with it.
QUIET_S = 0.04


@dataclass
class Times:
    """Seconds of a call: the median and the best of each turn."""

    medians: list[float] = field(default_factory=list)
    bests: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The best turn's median, which counts."""
        return min(self.medians)

    @property
    def best(self) -> float:
        """The best call."""
        return min(self.bests)

    def are_below(self, factor: float, other: Times) -> bool:
        """Whether they are less than a factor of another call's, from the same turns: the best one, and most."""
        ratios = [mine / theirs for mine, theirs in zip(self.medians, other.medians, strict=True)]
        return self.median < factor * other.median and statistics.median(ratios) < factor


def take_turn(calls: Sequence[Callable[[], object]], times: Sequence[Times], seconds: float) -> None:
    """Measure each call once more, one after the other, for that long: once, if a call takes longer."""
    for call, found in zip(calls, times, strict=True):
        taken: list[float] = []
        start = end = perf_counter()
        while not taken or end - start < seconds:
            before = perf_counter()
            call()
            end = perf_counter()
            taken.append(end - before)
        found.medians.append(statistics.median(taken))
        found.bests.append(min(taken))


class Peaks:
    """Yardsticks by instruction set and number of threads, each warmed up when it is first asked for."""

    def __init__(self) -> None:
        self._yardsticks: dict[tuple[str, int], Yardstick] = {}

    def gflops(self, isa: str, num: int | None = None) -> float:
        """The best slice so far of an instruction set on some threads (None: those in force), one more taken."""
        num = num_threads() if num is None else num
        known = (isa, num) in self._yardsticks
        with threads(num):
            yardstick = self._yardsticks.setdefault((isa, num), Yardstick(isa))
        sleep(QUIET_S)
        for _ in range(1 if known else 10):
            yardstick.take_peak()
        return yardstick.gflops
