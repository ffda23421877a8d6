"""What the machine can do: the dot instruction and the memory, on any number of threads at once."""

from __future__ import annotations

import numba

from .compile import kernel
from .context import PEAK, READ
from .memory import call


@kernel(entry=True, parallel=True)
def run_peak(context, operand, turns, targets, num_workers):
    """The peak loop on every worker; ``targets`` has a cache line for each."""
    for worker in numba.prange(num_workers):
        call(context[PEAK], (operand, turns, targets + 64 * worker))


@kernel(entry=True, parallel=True)
def run_read(context, source, bytes_each, targets, num_workers):
    """Every worker reads its own part of some memory."""
    for worker in numba.prange(num_workers):
        call(context[READ], (source + worker * bytes_each, bytes_each, targets + 64 * worker))
