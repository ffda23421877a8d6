"""A table of functions that time themselves, for one thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager

import llvmlite.binding as llvm
import numpy as np

from ..checks import address
from ..codegen.link import link, link_lock, target_machine
from ..codegen.module import build_modules
from ..codegen.timers import NOW, build_timers
from ..isa import Isa
from ..kernels.context import build_context
from ..runtime import use_table

# Called once a worker, and the work of no stage.
_NOT_TIMED = ("configure_tiles", "release_tiles")


class Timers:
    """A record's table in which every function adds up the cycles that it takes.

    Kernels call these one after the other, and none calls another through the table: times are exclusive.

    Parameters
    ----------
    isa : Isa
        The record.
    triple : str
        LLVM's target triple of this machine.

    Attributes
    ----------
    now : callable
        Cycles since some time.
    """

    def __init__(self, isa: Isa, triple: str) -> None:
        addresses = link(isa, triple)
        plain = build_context(isa, triple)
        self._symbols = [name for name, place in addresses.items() if place in plain and name not in _NOT_TIMED]
        self._counters = np.zeros(len(self._symbols), np.int64)
        first = address(self._counters)
        counters = {name: first + 8 * i for i, name in enumerate(self._symbols)}
        with link_lock:
            text = build_timers("\n".join(build_modules(isa, triple)), addresses, counters, triple)
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), target_machine(isa, triple))
            self._engine.finalize_object()
            timed = {addresses[name]: self._engine.get_function_address(name) for name in self._symbols}
            self.now: Callable[[], int] = ctypes.CFUNCTYPE(ctypes.c_int64)(self._engine.get_function_address(NOW))
        self._table = np.array([timed.get(entry, entry) for entry in plain.tolist()], np.int64)

    def in_use(self) -> AbstractContextManager[None]:
        """Around calls that are timed; only from one thread."""
        return use_table(self._table)

    def reset(self) -> None:
        """Start from zero."""
        self._counters[:] = 0

    def cycles(self) -> dict[str, int]:
        """Cycles by function, since the last start."""
        return dict(zip(self._symbols, self._counters.tolist(), strict=True))
