"""Measure an operation as a fraction of this machine's own peak: ``python benchmarks/run.py decode``.

Every result is checked against the float64 reference before its time is shown. A time is the median of many
calls; the peak is the best of many slices of dot instructions, taken between the calls of the same run. Up to
five rounds are measured, each printed; the best median counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from time import perf_counter, sleep

from cases import CASES, DTYPES, Case

import numba_mla
from numba_mla.machine import Yardstick

# A pool of threads may spin for a while after a call; a slice of the peak must not share the cores with it.
_QUIET_S = 0.02
_MIN_SECONDS = 0.4
_MIN_CALLS = 7


def measure(call, yardstick: Yardstick | None) -> tuple[float, float]:
    """Median and best seconds of a call; slices of the peak are taken in between."""
    call()
    start = perf_counter()
    call()
    once = perf_counter() - start
    num_calls = max(_MIN_CALLS, int(_MIN_SECONDS / max(once, 1e-6)))
    times: list[float] = []
    for group in range(4):
        for _ in range(-(-num_calls // 4)):
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
        if yardstick is not None and group % 2 == 0:
            sleep(_QUIET_S)
            yardstick.take_peak()
    return statistics.median(times), min(times)


def run_case(case: Case, yardstick: Yardstick, rounds: int) -> dict:
    """Check and measure one case."""
    error = case.error()
    if not error <= 1:
        return {"case": case.name, "error": error, "wrong": True}
    medians, bests, peers = [], [], []
    for _ in range(rounds):
        median, best = measure(case.call, yardstick)
        medians.append(median)
        bests.append(best)
        if case.peer is not None:
            sleep(_QUIET_S)
            peers.append(measure(case.peer, None)[0])
            sleep(_QUIET_S)
    median = min(medians)
    return {
        "case": case.name,
        "isa": case.isa,
        "error": error,
        "median_us": median * 1e6,
        "medians_us": [m * 1e6 for m in medians],
        "best_us": min(bests) * 1e6,
        "gflops": case.flops / median * 1e-9,
        "fraction": case.flops / median * 1e-9 / yardstick.gflops,
        "gbps": case.num_bytes / median * 1e-9,
        "bandwidth_fraction": case.num_bytes / median * 1e-9 / yardstick.read_gbps,
        "peer_gflops": case.flops / min(peers) * 1e-9 if peers else None,
    }


def print_row(row: dict) -> None:
    """One line of the table."""
    if row.get("wrong"):
        print(f"{row['case']:38} WRONG: error {row['error']:.3g} x tolerance", flush=True)
        return
    peer = "" if row["peer_gflops"] is None else f"  torch f32 {row['peer_gflops']:6.1f}"
    rounds = " ".join(f"{m:.0f}" for m in row["medians_us"])
    print(
        f"{row['case']:38} {row['isa']:10} {row['median_us']:9.1f} us  best {row['best_us']:9.1f}  "
        f"{row['gflops']:6.1f} GF/s  {row['fraction']:5.3f} of peak  {row['gbps']:5.1f} GB/s "
        f"({row['bandwidth_fraction']:4.2f})  error {row['error']:.2f} x tol{peer}  [{rounds}]",
        flush=True,
    )


def warm_up(yardstick: Yardstick) -> Yardstick:
    """A first measure of the machine's limits."""
    for _ in range(10):
        yardstick.take_peak()
    for _ in range(3):
        yardstick.take_bandwidth()
    return yardstick


def main() -> int:
    """Parse the command line, measure, print; 1 if any result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=sorted(CASES))
    parser.add_argument("--isa", help="an instruction set by name (the best by default)")
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES), help="element types (all but float16)")
    parser.add_argument("--threads", type=int, help="threads to use")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    threads = options.threads or numba_mla.show_config()["threads"]
    dtypes = [DTYPES[name] for name in options.dtype or ["float32", "bfloat16"]]
    with numba_mla.threads(threads):
        yardsticks: dict[str, Yardstick] = {}
        machine = numba_mla.show_config()
        rows = []
        for case in CASES[options.op](options.isa, dtypes):
            if options.only not in case.name:
                continue
            if case.isa not in yardsticks:
                yardsticks[case.isa] = warm_up(Yardstick(case.isa))
            rows.append(run_case(case, yardsticks[case.isa], options.rounds))
            if not options.json:
                print_row(rows[-1])
        machine["threading_layer"] = numba_mla.show_config()["threading_layer"]
    peaks = [
        {"isa": y.isa, "vector_bits": y.vector_bits, "peak_gflops": y.gflops, "read_gbps": y.read_gbps}
        for y in yardsticks.values()
    ]
    if options.json:
        print(json.dumps({"machine": machine, "peaks": peaks, "op": options.op, "cases": rows}, indent=1))
    else:
        print(f"{machine['cpu']}, {threads} threads ({machine['threading_layer']})")
        for y in yardsticks.values():
            print(f"peak of {y.isa}'s dot instruction at {y.vector_bits} bits: {y.gflops:.1f} GF/s, "
                  f"read bandwidth {y.read_gbps:.1f} GB/s")  # fmt: skip
    return int(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
