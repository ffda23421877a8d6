"""``with emulate():``, which puts the handler in its place and takes it away."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from ...runtime import tiles_emulated
from . import hardware
from .handler import ACTION_BYTES, SIGILL, build_handler, new_memory, set_fallback

_RT_SIGACTION = 13
_SA_SIGINFO = 4


class _SigAction(ctypes.Structure):
    """``struct sigaction`` of Linux's C libraries on x86-64."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Installation:
    """The process's handler, compiled once, and what stood in its place at each entry.

    Actions are kept and put back as the kernel's own records, so that whoever set them finds them unchanged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._memory = new_memory()
        self._handler = build_handler(self._memory)
        # None where the handler stood there already.
        self._replaced: list[bytes | None] = []

    def _current(self) -> bytes:
        action = ctypes.create_string_buffer(ACTION_BYTES)
        self._check(self._libc.syscall(_RT_SIGACTION, SIGILL, None, action, ctypes.c_size_t(8)))
        return action.raw

    def _check(self, result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"sigaction for SIGILL: {os.strerror(number)}")

    def enter(self) -> None:
        """Put the handler in its place, whoever stood there."""
        with self._lock:
            current = self._current()
            if int.from_bytes(current[:8], "little") == self._handler.address:
                self._replaced.append(None)
                return
            self._replaced.append(current)
            set_fallback(self._memory, current)
            action = _SigAction(handler=self._handler.address, flags=_SA_SIGINFO)
            self._check(self._libc.sigaction(SIGILL, ctypes.byref(action), None))

    def leave(self) -> None:
        """Put back what stood there at the matching entry."""
        with self._lock:
            replaced = self._replaced.pop()
            if replaced is None:
                return
            self._check(self._libc.syscall(_RT_SIGACTION, SIGILL, replaced, None, ctypes.c_size_t(8)))
            below = [action for action in self._replaced if action is not None]
            if below:
                set_fallback(self._memory, below[-1])


_building = threading.Lock()


@cache
def _installation() -> _Installation:
    return _Installation()


@contextmanager
def emulate() -> Iterator[str]:
    """Run AMX tile instructions inside the ``with`` block, in all threads, on the hardware or emulated.

    Where the processor has no AMX, its tile instructions raise SIGILL. A handler of that signal executes `ldtilecfg`,
    `sttilecfg`, `tilezero`, `tileloadd`, `tileloaddt1`, `tilestored`, `tdpbf16ps` and `tilerelease` on tiles of
    the thread's own and goes on after them. Any other illegal instruction meets what stood there before.

    Yields
    ------
    str
        ``"hardware"`` or ``"emulator"``.

    Raises
    ------
    RuntimeError
        Off Linux on x86-64, or where the processor has no fused multiply-add.

    Notes
    -----
    Numerics: ``C += even + odd``, where even and odd are the sums, from +0 and by fused multiply-adds, of the products
    of even and of odd features; round to nearest even, denormals are zero and results are flushed to zero, as the
    hardware does whatever the thread's settings are. NaNs come out quiet.

    Faults are the hardware's: SIGSEGV (#GP) for a configuration that is not legal, SIGILL (#UD) for tiles that are not
    configured, not of whole 32-bit elements, named twice or of shapes that disagree. At most 512 threads may hold
    configured tiles at once; one more ends the process, with a line on stderr that says so.

    Blocks nest, and may be entered from several threads. Whoever sets SIGILL's action inside the block replaces the
    emulator.

    Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and section 2.10.

    Examples
    --------
    >>> from numba_mla.testing.amx import emulate
    >>> def runs_tiles():
    ...     try:
    ...         with emulate() as how:
    ...             return how
    ...     except RuntimeError:
    ...         return "nowhere"
    >>> runs_tiles() in ("hardware", "emulator", "nowhere")
    True
    """
    hardware.require_platform()
    if hardware.has_amx():
        yield "hardware"
        return
    with _building:
        installation = _installation()
    installation.enter()
    try:
        with tiles_emulated():
            yield "emulator"
    finally:
        installation.leave()
