"""Measure an operation as a fraction of this machine's own peak: ``python benchmarks/run.py decode``.

Every result is checked against the float64 reference, and to be the same bits twice, before its time is shown.
A time is the median of many calls; the peak is the best of many slices of dot instructions, taken between the
calls of the same run, so that the last lines have the fractions that count. Each round is printed; the best median
counts. Quantised caches and weights are measured in turn with bfloat16 of the same shape: ``--dtype float8_e4m3fn``,
``--dtype fp8_ds_mla``, ``--dtype fp8_blocks``.
"""

from __future__ import annotations

import argparse
import sys

from cases import OPERATIONS, add_selection, select
from measure import Peaks, print_row, report, run_case

import numba_mla
from numba_mla.parallel import num_threads


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, print; 1 if any result was wrong, 2 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=sorted(OPERATIONS))
    add_selection(parser)
    options = parser.parse_args(arguments)
    rows: list[dict] = []
    with numba_mla.threads(options.threads or num_threads()):
        peaks = Peaks()
        for case in select(options.op, options):
            rows.append(run_case(case, peaks[case.isa], options.rounds))
            if not options.json:
                print_row(rows[-1])
        if not rows:
            parser.error(f"no case of {options.op} has these options")
        report({"op": options.op, "cases": rows}, peaks, options.json)
    return int(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
