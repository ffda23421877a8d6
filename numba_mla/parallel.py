"""Threads: how many a call uses, which of Numba's layers runs them, and what that layer cannot bear."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

import llvmlite.binding
import numba

# Numba imports it in its first call: a fork meanwhile would leave a child waiting for that import to end.
import numpy.ma  # noqa: F401
from numba.core import config
from numba.core.compiler_lock import global_compiler_lock
from numba.np.ufunc import parallel

from .checks import check_count
from .codegen.link import link_lock

NOT_STARTED = "not started"
_asked: ContextVar[int | None] = ContextVar("numba_mla_threads", default=None)
# Numba's workqueue layer ends the process when two threads launch at once. The lock is reentrant for the sake
# of signal handlers, whose calls may come before the kernel that another call of their thread is about to launch.
_launch_lock = threading.RLock()
# The layer, once Numba's threads have been started: its own word for that comes earlier.
_started: list[str] = []
# In the order in which a call takes them: this module's, and those of compilers.
_fork_locks = (_launch_lock, link_lock, global_compiler_lock, llvmlite.binding.ffi.lib._lock)
_held_for_fork = contextlib.ExitStack()


def _wait_to_fork() -> None:
    """Let other threads' launches and compilations end: a child would wait for ever for locks held by them."""
    for lock in _fork_locks:
        _held_for_fork.enter_context(lock)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_to_fork, after_in_parent=_held_for_fork.close, after_in_child=_held_for_fork.close)


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    """Use at most ``n`` threads for the calls in this block, in this context alone.

    Parameters
    ----------
    n : int
        Threads, at least 1. More than Numba's own limit (``NUMBA_NUM_THREADS``) gives that many.

    Raises
    ------
    TypeError, ValueError
        If ``n`` is not an integer, or is less than 1.

    Notes
    -----
    Results are the same bits for any number of threads. Other libraries' thread counts are left alone.

    Examples
    --------
    >>> import numba_mla
    >>> with numba_mla.threads(1):
    ...     numba_mla.show_config()["threads"]
    1
    """
    token = _asked.set(min(check_count("n", n, 1), config.NUMBA_NUM_THREADS))
    try:
        yield
    finally:
        _asked.reset(token)


def num_threads() -> int:
    """Threads that a call made now would use."""
    if not _started:
        load_tbb()
    if (_started[0] if _started else threading_layer()) == "omp" and _launching_process() != os.getpid():
        _warn_of_fork(os.getpid())
        return 1
    asked = _asked.get()
    if asked is not None:
        return asked
    _start_layer()
    # What numba.get_num_threads asks, without the lock of processes that it takes each time, although the threads
    # are started: an interrupt there may leave it locked for ever.
    return parallel._get_num_threads()  # type: ignore[attr-defined] # set once threads are started


def _start_layer() -> None:
    """Start Numba's threads, once; OpenMP's from a thread that ends.

    That layer sets the count of the thread that starts it, and torch may run on the same OpenMP library.
    """
    if _started:
        return
    with _launch_lock:
        if load_tbb():
            numba.get_num_threads()
        else:
            starter = threading.Thread(target=numba.get_num_threads)
            starter.start()
            starter.join()
        _launching_process()
        _started.append(threading_layer())


@cache
def _launching_process() -> int:
    """The process that started the threads, or asked; a forked child inherits the answer."""
    return os.getpid()


@cache
def _warn_of_fork(process: int) -> None:
    """Say once in a process that it runs serially: OpenMP's threads do not outlive a fork, and would end it."""
    warnings.warn(
        "numba_mla: this process was forked after OpenMP threads had started, so it computes on one thread, with "
        "the same bits; start processes with spawn, or install tbb",
        RuntimeWarning,
        stacklevel=3,
    )


@cache
def load_tbb() -> bool:
    """Load the tbb package's own library, where Numba would not look for it; whether it is there.

    Numba takes its tbb layer if the library's symbols are already in the process.
    """
    if os.environ.get("NUMBA_THREADING_LAYER", "default") not in ("default", "tbb", "safe", "threadsafe"):
        return False
    try:
        files = importlib.metadata.files("tbb") or []
        names = [file for file in files if file.name.startswith("libtbb.so.12")]
        for file in names[:1]:
            ctypes.CDLL(os.fspath(file.locate()), mode=ctypes.RTLD_GLOBAL)
        return bool(names)
    except (importlib.metadata.PackageNotFoundError, OSError):
        return False


def threading_layer() -> str:
    """The layer that runs parallel kernels; ``"not started"`` before the first one."""
    try:
        return numba.threading_layer()
    except ValueError:
        return NOT_STARTED


def launch(parallel_kernel: Callable, *arguments: Any) -> Any:
    """Run a parallel kernel: threads started before the first, one kernel at a time on workqueue."""
    _start_layer()
    if _started[0] in ("tbb", "omp"):
        return parallel_kernel(*arguments)
    with _launch_lock:
        return parallel_kernel(*arguments)
