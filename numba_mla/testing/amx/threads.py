"""Each thread's own tile state: a table in memory that a signal handler may search, without locks.

A thread owns an entry from `ldtilecfg` to `tilerelease`. Entries of threads that ended in between are found when the
table is full: the kernel knows which threads live.
"""

# Numba types these bodies.
# mypy: ignore-errors
from __future__ import annotations

from numba import njit

from .execute import STATE_BYTES
from .words import exchange_if, load_i64, store_i64, system_call

CAPACITY = 512
TABLE_BYTES = CAPACITY * (8 + STATE_BYTES)

_GETPID, _GETTID, _TGKILL = 39, 186, 234
_NO_SUCH_THREAD = -3


@njit(error_model="numpy")
def this_thread():
    """The kernel's number of the calling thread."""
    return system_call(_GETTID, 0, 0, 0, 0)


@njit(error_model="numpy")
def send(thread, signal):
    """Send a signal to a thread of this process (0 only asks whether there is one); negative where there is none."""
    return system_call(_TGKILL, system_call(_GETPID, 0, 0, 0, 0), thread, signal, 0)


@njit(error_model="numpy")
def _entry(thread, attempt):
    """The attempt's place for a thread: its own number's first, then all that follow."""
    return (thread + attempt) % CAPACITY


@njit(error_model="numpy")
def _state(table, entry):
    return table + 8 * CAPACITY + STATE_BYTES * entry


@njit(error_model="numpy")
def find(table, thread):
    """Address of a thread's tile state; 0 if its tiles are not configured."""
    for attempt in range(CAPACITY):
        entry = _entry(thread, attempt)
        if load_i64(table + 8 * entry) == thread:
            return _state(table, entry)
    return 0


@njit(error_model="numpy")
def claim(table, thread):
    """Address of an entry for a thread that has none; 0 if as many living threads have one as the table holds."""
    for attempt in range(CAPACITY):
        entry = _entry(thread, attempt)
        if exchange_if(table + 8 * entry, 0, thread):
            return _state(table, entry)
    for entry in range(CAPACITY):
        owner = load_i64(table + 8 * entry)
        if send(owner, 0) == _NO_SUCH_THREAD and exchange_if(table + 8 * entry, owner, thread):
            return _state(table, entry)
    return 0


@njit(error_model="numpy")
def release(table, thread):
    """Give a thread's entry back, if it has one."""
    for attempt in range(CAPACITY):
        entry = _entry(thread, attempt)
        if load_i64(table + 8 * entry) == thread:
            store_i64(table + 8 * entry, 0)
            return
