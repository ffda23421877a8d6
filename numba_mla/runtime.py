"""Where a call meets the machine: the instruction set in force, its table of functions, reusable memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numba.core import config

from . import isa as isas
from .checks import FLOAT_DTYPES, address, describe
from .codegen.link import find_spills
from .errors import IsaUnavailableError
from .isa import Isa, Tiling
from .isa.host import Host, detect
from .kernels.context import build_context
from .memory import LINE

# Raised whenever a release changes any bit of any result on any instruction set.
NUMERICS_VERSION = 1

_TILED = ("decode", "extend", "prefill")
DEFAULT_TILING = Tiling()

_forced: ContextVar[str | None] = ContextVar("numba_mla_isa", default=None)
_table: ContextVar[np.ndarray | None] = ContextVar("numba_mla_table", default=None)


# The dictionary behind os.environ. Asked through that, which takes four calls and an error, it would be a sixth of all
# that Python does around a kernel.
_environment: dict = os.environ._data  # type: ignore[attr-defined]
_ISA_VARIABLE = os.environ.encodekey("NUMBA_MLA_ISA")

# How many blocks of code run with tile instructions emulated; emulation is the whole process's.
_emulating = [0]


def host() -> Host:
    """This machine, or the one that Numba was told to compile for."""
    found = detect(config.CPU_NAME, config.CPU_FEATURES)
    return replace(found, tiles=True) if _emulating[0] else found


@contextlib.contextmanager
def tiles_emulated() -> Iterator[None]:
    """Around code that runs with tile instructions emulated, in all threads: they count as there."""
    _emulating[0] += 1
    try:
        yield
    finally:
        _emulating[0] -= 1


def available_isas() -> tuple[str, ...]:
    """Names of the instruction sets that this machine can run, best first.

    Returns
    -------
    tuple of str

    Examples
    --------
    >>> import numba_mla
    >>> numba_mla.available_isas()[-1]
    'generic'
    """
    return isas.available_isas(host())


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Use an instruction set for the calls in this block, in this context alone.

    Parameters
    ----------
    name : str
        One of ``available_isas()``. A call's own ``isa=`` goes before it, ``NUMBA_MLA_ISA`` after it.

    Raises
    ------
    IsaUnavailableError
        If the name is unknown or this machine cannot run it.
    TypeError
        If it is not a string.

    Examples
    --------
    >>> import numba_mla
    >>> with numba_mla.use_isa("generic"):
    ...     numba_mla.show_config()["isa"]
    'generic'
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a name such as 'generic', got {describe(name)}")
    select_isa(name)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


@cache
def _select(host: Host, dtype: str | None, forced: str | None) -> Isa:
    return isas.select(host, dtype, forced)


def isa_choice(argument: str | None) -> tuple:
    """All that decides a call's functions: its argument, ``use_isa``, ``NUMBA_MLA_ISA``, emulated tiles, a table."""
    if argument is None:
        argument = _forced.get() or _environment.get(_ISA_VARIABLE)
    table = _table.get()
    return argument, _emulating[0] > 0, None if table is None else id(table)


def select_isa(argument: str | None = None, dtype: str | None = None) -> Isa:
    """The record for a call: its own argument, else ``use_isa``, else ``NUMBA_MLA_ISA``, else the best.

    Where that one does not take the element type, its companion does.
    """
    if argument is not None:
        if not isinstance(argument, str):
            raise TypeError(f"isa: expected a name such as 'generic', got {describe(argument)}")
        return _select(host(), dtype, argument)
    named = _forced.get()
    if named is not None or not os.environ.get("NUMBA_MLA_ISA"):
        return _select(host(), dtype, named)
    try:
        return _select(host(), dtype, os.environ["NUMBA_MLA_ISA"])
    except IsaUnavailableError as error:
        raise IsaUnavailableError(f"NUMBA_MLA_ISA, {error}") from None


def context_for(argument: str | None = None, dtype: str | None = None, tiling: Tiling | None = None,
                one_head: bool = False) -> np.ndarray:  # fmt: skip
    """The table of functions for a call; ``one_head``: of attention over rows that are one head's of many."""
    record, table = tiled_isa(argument, dtype, tiling, one_head), _table.get()
    return build_context(record, host().triple) if table is None else table


def tiled_isa(argument: str | None = None, dtype: str | None = None, tiling: Tiling | None = None,
              one_head: bool = False) -> Isa:  # fmt: skip
    """The record for a call, with its tiling."""
    return _fit(select_isa(argument, dtype), check_tiling(tiling), one_head)


def check_tiling(tiling: Tiling | None) -> Tiling:
    """A call's tiling; None is one that leaves all as it is."""
    if tiling is None:
        return DEFAULT_TILING
    if not isinstance(tiling, Tiling):
        raise TypeError(f"tiling: expected a Tiling or None, got {describe(tiling)}")
    return tiling


def default_tiling(op: str, isa: str | None = None, dtype: str = "bfloat16") -> Tiling:
    """The tiling that an operation has on an instruction set, the same for every shape.

    Parameters
    ----------
    op : {"decode", "extend", "prefill"}
        The operation.
    isa : str, optional
        One of ``available_isas()``; None: the one in force.
    dtype : {"float32", "float16", "bfloat16"}
        Element type of the queries: it decides which instruction set computes.

    Returns
    -------
    Tiling
        Every field of it has a value.

    Raises
    ------
    ValueError, TypeError
        An unknown operation; an instruction set that this machine cannot run.

    Examples
    --------
    >>> import numba_mla
    >>> numba_mla.default_tiling("decode", "generic").key_tile
    256
    """
    for name, value, choices in (("op", op, _TILED), ("dtype", dtype, [str(known) for known in FLOAT_DTYPES])):
        if value not in choices:
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
    return _fit(select_isa(isa, dtype), DEFAULT_TILING, op == "prefill").tiling


@cache
def _fit(isa: Isa, tiling: Tiling, one_head: bool) -> Isa:
    """The record with a tiling; what the compiler made of a block of the caller's is looked at for spills."""
    fitted = isas.fit(isa, tiling, one_head)
    if fitted.tiling.score_block != isa.tiling.score_block or fitted.tiling.value_block != isa.tiling.value_block:
        for symbol, lines in find_spills(fitted, host().triple).items():
            raise isas.misfit(isa, tiling, f"{symbol} would spill: {len(lines)} times, such as {lines[0]!r}")
    return fitted


@contextlib.contextmanager
def use_table(table: np.ndarray) -> Iterator[None]:
    """Use this table of functions for the calls in this block, in this context alone, whatever ``isa`` they name."""
    token = _table.set(table)
    try:
        yield
    finally:
        _table.reset(token)


class Memory(NamedTuple):
    """Bytes from a cache line's boundary on, and the array that they belong to."""

    array: np.ndarray
    address: int
    size: int


def _place(num_bytes: int) -> Memory:
    array = np.empty(num_bytes + LINE, np.uint8)
    return Memory(array, -(-address(array) // LINE) * LINE, num_bytes)


class _Workspace(threading.local):
    """A thread's own memory for kernels, kept between calls and grown when a call needs more."""

    def __init__(self) -> None:
        self.kept = _place(0)

    def reserve(self, num_bytes: int) -> Memory:
        """At least that many bytes.

        The caller keeps the array while a kernel uses its address: this object may let go of the memory before,
        when a signal handler's call grows it, or when the interpreter ends under a thread that computes.
        """
        if self.kept.size < num_bytes:
            self.kept = _place(num_bytes)
        return self.kept


workspace = _Workspace()
