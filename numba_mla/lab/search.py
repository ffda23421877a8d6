"""The search for the fastest tiling of a workload."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter

from ..checks import check_flag, check_scale, describe
from ..isa import Tiling
from ..runtime import default_tiling
from .progress import Progress, shown
from .timing import Times, take_turn
from .workload import Workload

# What is tried of each field, those first that matter most; what does not fit an instruction set is left out.
_VALUES: dict[str, tuple] = {
    "lane_group": (16, 32, 64, 128, 256, 512),
    "least_lanes": (4, 8, 16, 32, 64),
    "value_block": (
        (4, 2), (6, 2), (8, 2), (12, 2), (14, 2), (4, 4), (6, 4), (4, 3), (16, 2), (16, 4), (32, 2), (48, 1),
    ),
    "interleave": ("fused", "separate"),
    "score_block": (
        (4, 1), (6, 1), (8, 1), (12, 1), (16, 1), (24, 1), (4, 2), (6, 2), (8, 2), (12, 2), (4, 3), (4, 4), (6, 4),
        (32, 1), (32, 2), (48, 1),
    ),
    "prefetch_rows": (0, 4, 8, 16, 32, 64),
    "value_unroll": (2, 4, 8, 16, 32, 64),
    "score_unroll": (8, 16, 32),
    "item_order": ("auto", "heaviest", "rows"),
}  # fmt: skip
_CHANGING_VALUES: dict[str, tuple] = {"key_tile": (128, 256, 512), "kv_split": (512, 1024, 2048, 4096)}
# A tiling takes the best one's place if it is faster by more than times of the same tiling differ.
_FASTER = 0.99
# One that is slower than this many times the fastest has no further turn.
_HOPEFUL = 1.05
# Short turns: a neighbour on the machine, who is there for some hundredths of a second, meets all tilings.
_TURN_S = 5e-3
_TURNS, _DUEL_TURNS, _LEAST_TURNS = 15, 40, 3
# Of the time: kept for comparing the best with the default at the end, and the most that such a comparison takes;
# and in the first pass over fields, kept for further ones.
_FINAL_SHARE, _SECOND_SHARE = 0.1, 0.25


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Parameters
    ----------
    tiling : Tiling
        The fastest, of fields that differ from the default's alone.
    default, best : Times
        Of the default tiling and of this one, measured in turns.
    num_tried : int
        Tilings that were checked and measured beside the default.
    interrupted : bool
        Whether Ctrl-C ended it.
    """

    tiling: Tiling
    default: Times
    best: Times
    num_tried: int
    interrupted: bool

    @property
    def speed(self) -> float:
        """How many times as fast as the default."""
        return self.default.median / self.best.median


def search(workload: Workload, *, budget_s: float = 30.0, change_bits: bool = False,
           progress: Progress | None = None) -> Tuned:  # fmt: skip
    """As ``tune`` does, on a workload; with the times of the default and of the best.

    Raises
    ------
    RuntimeError
        If the default tiling's result is wrong.
    """
    budget_s = check_scale("budget_s", budget_s)
    values = {**_VALUES, **(_CHANGING_VALUES if check_flag("change_bits", change_bits) else {})}
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a callable or None, got {describe(progress)}")
    with shown(progress) as tell:
        tell(0.0, "the reference")
        if not workload.check().is_right(Tiling()):
            raise RuntimeError("the default tiling's result is not within its tolerance")
        found = _Search(workload, values, budget_s, tell)
        try:
            found.run()
        except KeyboardInterrupt:
            found.interrupted = True
    return found.result()


class _Search:
    """A search under way: the best so far, and the times of the default and of it, from the same turns."""

    def __init__(self, workload: Workload, values: dict[str, tuple], budget_s: float,
                 tell: Callable[[float, str], None]) -> None:  # fmt: skip
        self.interrupted = False
        self._workload = workload
        self._values = values
        self._budget_s = budget_s
        self._tell = tell
        self._start = perf_counter()
        self._right: dict[Tiling, bool] = {}
        self._tried: set[Tiling] = set()
        self._default = self._best = default_tiling(workload.op, workload.isa, workload.dtype)
        self._times = (Times(),) * 2
        self._measure(self._default, self._times[0])

    def run(self) -> None:
        """Passes over all fields until nothing is left to try, and a last comparison with the default."""
        end = self._budget_s * (1 - _FINAL_SHARE)
        self._pass(end - self._budget_s * _SECOND_SHARE)
        num_tried = -1
        while self._elapsed() < end and len(self._tried) > num_tried:
            num_tried = len(self._tried)
            self._pass(end)
        self._confirm()

    def result(self) -> Tuned:
        """What was found."""
        tiling = difference(self._best, self._default)
        return Tuned(tiling, *self._times, len(self._tried) - 1, self.interrupted)

    def _pass(self, end: float) -> None:
        """Every field once, the time shared out by how many values they have."""
        left = sum(len(values) for values in self._values.values())
        for name, values in self._values.items():
            now = self._elapsed()
            if now >= end:
                return
            self._try_field(name, values, now + (end - now) * len(values) / left)
            left -= len(values)

    def _try_field(self, name: str, values: tuple, end: float) -> None:
        """Measure other values of a field in turns with the best; the fastest challenges it.

        One is measured whatever the time.
        """
        times: dict[Tiling, Times] = {}
        for tiling in (self._best, *(replace(self._best, **{name: value}) for value in values)):
            self._show(name)
            has_time = len(times) < 2 or self._elapsed() < end
            new = has_time and tiling not in self._tried and self._is_right(tiling)
            if new or tiling == self._best:
                self._measure(tiling, times.setdefault(tiling, Times()))
        for _ in range(_TURNS if len(times) > 1 else 0):
            fastest = min(found.median for found in times.values())
            for tiling, found in times.items():
                if self._elapsed() < end and found.median <= _HOPEFUL * fastest:
                    self._show(name)
                    self._measure(tiling, found)
        rival = min(times, key=lambda tiling: times[tiling].median)
        if times[rival].median < _FASTER * times[self._best].median:
            self._duel(rival)

    def _duel(self, rival: Tiling) -> None:
        """Compare a rival with the default and the best, whose place it takes if it is faster than both."""
        others = list(dict.fromkeys((self._default, self._best)))
        times = self._compare([*others, rival])
        if all(times[rival].are_below(_FASTER, times[other]) for other in others):
            self._best, self._times = rival, (times[self._default], times[rival])

    def _confirm(self) -> None:
        """Compare the best with the default once more: that it was chosen for its times flattered them."""
        times = self._compare(list(dict.fromkeys((self._default, self._best))))
        if not times[self._best].are_below(_FASTER, times[self._default]):
            self._best = self._default
        self._times = times[self._default], times[self._best]

    def _compare(self, field: list[Tiling]) -> dict[Tiling, Times]:
        """Times of some tilings in turns: some if there is time, one whatever the time."""
        times = {tiling: Times() for tiling in field}
        end = self._elapsed() + _FINAL_SHARE * self._budget_s
        for turn in range(_DUEL_TURNS):
            for tiling in field:
                self._show("compared with the default")
                self._measure(tiling, times[tiling])
            if self._elapsed() >= (self._budget_s if turn < _LEAST_TURNS else end):
                break
        return times

    def _measure(self, tiling: Tiling, times: Times) -> None:
        self._tried.add(tiling)
        take_turn([partial(self._workload.run, tiling)], [times], _TURN_S)

    def _is_right(self, tiling: Tiling) -> bool:
        """Whether a tiling fits, and gives what it should; a wrong result is never timed."""
        if tiling not in self._right:
            right = self._fits(tiling)
            if right and not self._workload.check(tiling).is_right(difference(tiling, self._default)):
                warnings.warn(f"numba_mla: {tiling} gave a wrong result and was left out", RuntimeWarning, stacklevel=2)
                right = False
            self._right[tiling] = right
        return self._right[tiling]

    def _fits(self, tiling: Tiling) -> bool:
        try:
            self._workload.candidate(tiling)
        except ValueError:
            return False
        return True

    def _elapsed(self) -> float:
        return perf_counter() - self._start

    def _show(self, note: str) -> None:
        default, best = self._times
        speed = default.median / best.median if best.medians else 1.0
        self._tell(self._elapsed() / self._budget_s, f"{note}, the best {speed:.3f} times as fast as the default")


def difference(tiling: Tiling, default: Tiling) -> Tiling:
    """The fields of a full tiling that differ from the default's: laid over it, they give that tiling again."""
    given = {name: value for name, value in asdict(tiling).items() if value != getattr(default, name)}
    if "lane_group" in given:
        given["least_lanes"] = tiling.least_lanes
    return Tiling(**given)
