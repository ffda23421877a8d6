"""How a case is measured: its result checked, calls timed in turns, and the machine's peak taken in between."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

from case import Case, is_right

import numba_mla
from numba_mla.machine import Yardstick

# A pool of threads, a library's that the check used too, may spin for a while after a call; what is timed next must
# not share the cores with it.
QUIET_S = 0.04
_MIN_SECONDS = 0.4
_MIN_CALLS = 7
_GROUPS = 4
_READS = 2


class Times(NamedTuple):
    """Seconds of a call, the median and the best of each round; and what memory gave just then, 10^9 bytes/s."""

    medians: list[float]
    bests: list[float]
    reads: list[float]

    @property
    def median(self) -> float:
        """The best round's median, which counts."""
        return min(self.medians)

    @property
    def read_gbps(self) -> float:
        """The best round's read bandwidth."""
        return self.reads[self.medians.index(self.median)]


class Peaks(dict[str, Yardstick]):
    """Yardsticks by instruction set, each warmed up when it is first asked for."""

    def __missing__(self, isa: str) -> Yardstick:
        yardstick = self[isa] = Yardstick(isa)
        for _ in range(10):
            yardstick.take_peak()
        for _ in range(3):
            yardstick.take_bandwidth()
        return yardstick


def measure(call: Callable[[], object], yardstick: Yardstick | None = None) -> tuple[float, float]:
    """Median and best seconds of a call; slices of the peak are taken in between."""
    call()
    start = perf_counter()
    call()
    once = perf_counter() - start
    num_calls = max(_MIN_CALLS, int(_MIN_SECONDS / max(once, 1e-6)))
    times: list[float] = []
    for group in range(_GROUPS):
        for _ in range(-(-num_calls // _GROUPS)):
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
        if yardstick is not None and group % 2 == 0:
            sleep(QUIET_S)
            yardstick.take_peak()
    return statistics.median(times), min(times)


def take_turns(calls: list[Callable[[], object]], rounds: int, yardstick: Yardstick | None = None) -> list[Times]:
    """Times of some calls, each measured once in every round, so that a busy moment of the machine meets all.

    Memory is shared with all that runs on the machine, not in this process alone: its bandwidth doubles within
    seconds. So it is read just before and after each measurement, and the best of these reads counts.
    """
    times = [Times([], [], []) for _ in calls]
    for _ in range(rounds):
        for call, (medians, bests, reads) in zip(calls, times, strict=True):
            slices = _read(yardstick)
            median, best = measure(call, yardstick)
            medians.append(median)
            bests.append(best)
            sleep(QUIET_S)
            slices += _read(yardstick)
            reads.append(max(slices, default=0.0))
    return times


def _read(yardstick: Yardstick | None) -> list[float]:
    """The bandwidth of a few reads, one after the other."""
    return [] if yardstick is None else [yardstick.take_bandwidth() for _ in range(_READS)]


def run_case(case: Case, yardstick: Yardstick, rounds: int) -> dict:
    """Check and measure one case, in turn with the one beside it."""
    cases = [case] if case.beside is None else [case, case.beside]
    verdicts = [one.check() for one in cases]
    for one, verdict in zip(cases, verdicts, strict=True):
        if not is_right(verdict):
            return {"case": one.name, "wrong": True, **verdict}
    sleep(QUIET_S)
    ours, *others = take_turns([one.call for one in cases], rounds, yardstick)
    row = row_of(case, verdicts[0], ours, yardstick)
    for other, times in zip(cases[1:], others, strict=True):
        row["beside"] = {"case": other.name, **summary(times), "speed": times.median / ours.median}
    return row


def row_of(case: Case, verdict: dict, times: Times, yardstick: Yardstick) -> dict:
    """What is reported of a case."""
    gflops, gbps = case.flops / times.median * 1e-9, case.num_bytes / times.median * 1e-9
    return {
        "case": case.name,
        "isa": case.isa,
        **verdict,
        **summary(times),
        "gflops": gflops,
        "fraction": gflops / yardstick.gflops,
        "gbps": gbps,
        "read_gbps": times.read_gbps,
        "bandwidth_fraction": gbps / times.read_gbps,
    }


def summary(times: Times) -> dict:
    """Microseconds of some rounds."""
    return {
        "median_us": times.median * 1e6,
        "medians_us": [median * 1e6 for median in times.medians],
        "best_us": min(times.bests) * 1e6,
    }


def print_row(row: dict) -> None:
    """One line of the table."""
    if row.get("wrong"):
        print(wrong(row), flush=True)
        return
    rounds = " ".join(f"{median:.0f}" for median in row["medians_us"])
    beside = row.get("beside")
    ratio = f"  {beside['speed']:.3f} of the speed of {beside['case'].split()[-1]}" if beside else ""
    print(
        f"{row['case']:38} {row['isa']:10} {row['median_us']:9.1f} us  best {row['best_us']:9.1f}  "
        f"{row['gflops']:6.1f} GF/s  {row['fraction']:5.3f} of the peak so far  {row['gbps']:5.1f} GB/s "
        f"({row['bandwidth_fraction']:4.2f} of {row['read_gbps']:.0f})  error {row['error']:.2f} x tol{ratio}  "
        f"[{rounds}]",
        flush=True,
    )


def wrong(row: dict) -> str:
    """A line for a result that failed its check."""
    bits = "" if row["same_bits"] else ", not the same bits twice"
    return f"{row['case']:38} WRONG: error {row['error']:.3g} x tolerance{bits}"


def report(document: dict, peaks: Peaks, as_json: bool) -> None:
    """The closing lines about the machine, or all of it as one JSON document.

    The peak may have been found after a case was measured: what part of it each case reached is known in the end.
    """
    rows = [row for row in document["cases"] if "fraction" in row]
    for row in rows:
        row["fraction"] = row["gflops"] / peaks[row["isa"]].gflops
    machine = numba_mla.show_config()
    found = [
        {"isa": y.isa, "vector_bits": y.vector_bits, "peak_gflops": y.gflops, "read_gbps": y.read_gbps}
        for y in peaks.values()
    ]
    if as_json:
        package = str(Path(numba_mla.__file__).parent)
        print(json.dumps({"package": package, "machine": machine, "peaks": found, **document}, indent=1))
        return
    print(f"{machine['cpu']}, {machine['threads']} threads ({machine['threading_layer']})")
    for peak in found:
        print(f"peak of {peak['isa']}'s dot instruction at {peak['vector_bits']} bits: {peak['peak_gflops']:.1f} GF/s, "
              f"read bandwidth {peak['read_gbps']:.1f} GB/s")  # fmt: skip
    for row in rows:
        print(f"{row['case']:38} {row['isa']:10} {row['fraction']:5.3f} of this peak")
