"""The physical limits of this machine, measured: arithmetic of an instruction set, and read bandwidth.

They are taken in short slices between other work, and the best slice counts: on a shared machine a long
measurement averages the neighbours in.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from .codegen.module import peak_flops
from .kernels.probe import run_peak, run_read
from .memory import LINE
from .parallel import launch, num_threads
from .runtime import context_for, select_isa

_SLICE_S = 5e-3
_READ_BYTES = 1 << 28


class Yardstick:
    """Measured peaks of one instruction set, on as many threads as calls use.

    Parameters
    ----------
    isa : str, optional
        One of ``available_isas()``; None: the one in force.
    num_threads : int, optional
        Threads; None: those in force.

    Attributes
    ----------
    isa : str
        The instruction set.
    vector_bits : int
        Width of the vectors that it was compiled to.
    gflops : float
        The best slice of dot instructions so far, 10^9 floating point operations per second.
    read_gbps : float
        The best read of memory so far, 10^9 bytes per second.

    Examples
    --------
    >>> from numba_mla.machine import Yardstick
    >>> yardstick = Yardstick("generic")
    >>> yardstick.take_peak() > 0
    True
    """

    def __init__(self, isa: str | None = None, threads: int | None = None) -> None:
        record = select_isa(isa)
        self.isa = record.name
        self.vector_bits = 8 * record.vector_bytes
        self.gflops = 0.0
        self.read_gbps = 0.0
        self._threads = num_threads() if threads is None else threads
        self._context = context_for(record.name)
        self._flops_a_turn = peak_flops(record) * self._threads
        self._operand = np.full(record.vector_width, 1e-3, np.float32)
        self._targets = np.zeros(self._threads * LINE, np.uint8)
        self._turns = 1000
        self._memory: np.ndarray | None = None
        self._run_peak(1)

    def take_peak(self) -> float:
        """Measure one slice of about 5 ms; the best one counts, this one is returned."""
        seconds = self._run_peak(self._turns)
        gflops = self._flops_a_turn * self._turns / seconds * 1e-9
        self.gflops = max(self.gflops, gflops)
        self._turns = max(1000, int(self._turns * min(8.0, _SLICE_S / seconds)))
        return gflops

    def take_bandwidth(self) -> float:
        """Read 256 MiB once; the best bandwidth counts, this one is returned: it changes with what else runs."""
        if self._memory is None:
            self._memory = np.ones(_READ_BYTES, np.uint8)
        each = _READ_BYTES // self._threads // LINE * LINE
        start = perf_counter()
        launch(run_read, self._context, self._memory.ctypes.data, each, self._targets.ctypes.data, self._threads)
        gbps = each * self._threads / (perf_counter() - start) * 1e-9
        self.read_gbps = max(self.read_gbps, gbps)
        return gbps

    def _run_peak(self, turns: int) -> float:
        start = perf_counter()
        launch(run_peak, self._context, self._operand.ctypes.data, turns, self._targets.ctypes.data, self._threads)
        return perf_counter() - start
