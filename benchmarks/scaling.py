"""Measure how decode scales: with the length of requests, with threads, and down to tiny calls.

``python benchmarks/scaling.py`` prints the time per KV token as requests grow from 1024 to 131072 tokens, each call
over the same number of tokens in all; the time on one thread over that on several; and the time of a call so
small that its overhead is all there is. Each result is checked against the float64 reference first. What the cores
themselves gain by being several, in a loop of nothing but arithmetic, stands beside the threads' gain.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
from attention_cases import decode_case
from case import Case, is_right
from measure import summary, take_turns, wrong

import numba_mla
from numba_mla.machine import Yardstick
from numba_mla.parallel import num_threads

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
HEADS = (128, 16)
THREADS_SHAPE = (8, 128, 2048)
TINY_SHAPE = (1, 16, 64)
# Slices of the peak loop; the first quarter warms up.
_SLICES = 80
# What decode is held to: the slowest time per token over the fastest; one thread over two; microseconds.
LIMITS = {"flatness": 1.15, "two_threads": 1.9, "tiny_us": 60.0}


class WrongResultError(Exception):
    """A result that failed its check; its time is not shown."""


def checked(case: Case) -> Case:
    """The case, if its result is right."""
    verdict = case.check()
    if not is_right(verdict):
        raise WrongResultError(wrong({"case": case.name, **verdict}))
    return case


def scale_length(heads: int, lengths: tuple[int, ...], batch: int | None, stored: str, rounds: int) -> dict:
    """Nanoseconds per KV token at each length, and the largest over the smallest."""
    per_token = {}
    for seq_len in lengths:
        num_requests = batch or max(lengths) // seq_len
        case = checked(decode_case(num_requests, heads, seq_len, stored))
        times = take_turns([case.call], rounds)[0]
        per_token[seq_len] = times.median / (num_requests * seq_len) * 1e9
    return {"heads": heads, "ns_per_token": per_token, "flatness": max(per_token.values()) / min(per_token.values())}


def scale_threads(stored: str, rounds: int) -> dict:
    """Times at 1, 2, 4 and so on threads, and how many times as fast as one thread each is, and the cores are."""
    case = checked(decode_case(*THREADS_SHAPE, stored))
    counts = [1 << power for power in range(num_threads().bit_length())]
    times = take_turns([_on_threads(case, count) for count in counts], rounds)
    speedups = {count: times[0].median / each.median for count, each in zip(counts, times, strict=True)}
    by_count = {count: summary(each) for count, each in zip(counts, times, strict=True)}
    return {"case": case.name, "speedup": speedups, "threads": by_count, "cores": _scale_cores(counts)}


def _scale_cores(counts: list[int]) -> dict[int, float]:
    """How many times the arithmetic of one core so many do, in the median slice."""
    yardsticks = [Yardstick(threads=count) for count in counts]
    slices = np.array([[each.take_peak() for each in yardsticks] for _ in range(_SLICES)])[_SLICES // 4 :]
    medians = np.median(slices, axis=0)
    return dict(zip(counts, (medians / medians[0]).tolist(), strict=True))


def _on_threads(case: Case, count: int):
    def call():
        with numba_mla.threads(count):
            case.call()

    return call


def time_tiny(stored: str, rounds: int) -> dict:
    """Microseconds of a tiny call."""
    case = checked(decode_case(*TINY_SHAPE, stored))
    return {"case": case.name, **summary(take_turns([case.call], rounds)[0])}


def missed(found: dict) -> list[str]:
    """The limits that the results do not keep."""
    kept = {
        "flatness": all(row["flatness"] <= LIMITS["flatness"] for row in found["lengths"]),
        "two_threads": found["threads"]["speedup"].get(2, LIMITS["two_threads"]) >= LIMITS["two_threads"],
        "tiny_us": found["tiny"]["median_us"] <= LIMITS["tiny_us"],
    }
    return [name for name, is_kept in kept.items() if not is_kept]


def print_results(found: dict) -> None:
    """The tables."""
    for row in found["lengths"]:
        print(f"H={row['heads']}: ns per KV token at each length, largest over smallest {row['flatness']:.3f} "
              f"(at most {LIMITS['flatness']})")  # fmt: skip
        for seq_len, ns in row["ns_per_token"].items():
            print(f"  S={seq_len:<7} {ns:9.2f}")
    print(f"{found['threads']['case']}: as fast as one thread (two threads at least {LIMITS['two_threads']})")
    for count, speedup in found["threads"]["speedup"].items():
        print(f"  {count:3} threads {speedup:6.2f} x  {found['threads']['threads'][count]['median_us']:9.1f} us  "
              f"(arithmetic alone {found['threads']['cores'][count]:.2f} x)")  # fmt: skip
    print(f"{found['tiny']['case']}: {found['tiny']['median_us']:.1f} us (at most {LIMITS['tiny_us']})")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print; 1 if a result is wrong or a limit is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", help="how the cache is stored")
    parser.add_argument("--batch", type=int, help="requests of a call, whatever their length (the same tokens in all)")
    parser.add_argument("--threads", type=int, help="the most threads to use")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    with numba_mla.threads(options.threads or num_threads()):
        try:
            found = {
                "lengths": [
                    scale_length(heads, LENGTHS, options.batch, options.dtype, options.rounds) for heads in HEADS
                ],
                "threads": scale_threads(options.dtype, options.rounds),
                "tiny": time_tiny(options.dtype, options.rounds),
            }
        except WrongResultError as error:
            print(error)
            return 1
        machine = numba_mla.show_config()
    if options.json:
        print(json.dumps({"machine": machine, **found, "missed": missed(found)}, indent=1))
    else:
        print_results(found)
        print(f"{machine['cpu']}, {machine['threads']} threads ({machine['threading_layer']})")
    return int(bool(missed(found)))


if __name__ == "__main__":
    sys.exit(main())
