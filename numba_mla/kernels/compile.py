"""``@kernel``: Numba's compiler with a disk cache that is keyed by what all kernels are made from.

Numba keys its own cache by a function's file alone, so an edit in a module that the function calls would go
unseen, and a damaged file raises. Here the key is the content of every module of this folder and of the
function's own, and the files are those of ``codegen.store``: written whole, checked by a digest, compiled anew when
they do not load.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import llvmlite
import numba
from numba.core import config
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ..codegen import store


@cache
def source_hash(folder: Path | None = None) -> str:
    """A hash of all kernel sources, of another folder's, of Numba and of what else changes code."""
    folders = filter(None, dict.fromkeys((Path(__file__).parent, folder)))
    sources = [path.read_bytes() for each in folders for path in sorted(each.glob("*.py"))]
    # The head of a Python object is a constant in kernels that read arrays.
    settings = (numba.__version__, llvmlite.__version__, str(object.__basicsize__), str(config.CPU_NAME),
                str(config.CPU_FEATURES), str(config.OPT), str(config.BOUNDSCHECK),
                str(config.DEBUGINFO_DEFAULT))  # fmt: skip
    return store.content_hash(*(hashlib.sha256(source).hexdigest() for source in sources), *settings)


# Of what Numba makes parallel by itself, nothing but the loops that say so: looking for the rest takes seconds.
_SEARCHES = ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion")
_PRANGE_ALONE = {"prange": True, **dict.fromkeys(_SEARCHES, False)}


class _ContentCache(_Cache):
    """One file for each compiled signature of one function, named by everything that it depends on."""

    def __init__(self, function: Callable) -> None:
        self._function = function
        self._folder = Path(function.__code__.co_filename).parent

    @property
    def cache_path(self) -> str:
        return str(store.cache_folder())

    def _name(self, signature, codegen) -> str:
        name = self._function.__name__
        where = f"{self._function.__module__}.{self._function.__qualname__}"
        key = store.content_hash(source_hash(self._folder), where, repr(signature), repr(codegen.magic_tuple()))
        return f"{name}-{key}.kernel"

    def load_overload(self, sig, target_context):
        target_context.refresh()
        content = store.load(self._name(sig, target_context.codegen()))
        if content is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        except Exception:
            # Whatever a foreign file raises on the way, the answer is the same: compile.
            return None

    def save_overload(self, sig, data):
        if data.library.has_dynamic_globals:
            return  # addresses of this process are in the code
        store.save(self._name(sig, data.codegen), dumps(data._reduce()))

    def enable(self):
        """Numba's interface; this cache is always on."""

    def disable(self):
        """Numba's interface; this cache is always on."""

    def flush(self):
        """Numba's interface; content never goes stale."""


def kernel(function: Callable | None = None, *, entry: bool = False, parallel: bool = False) -> Callable:
    """Compile a function on its first call, without the interpreter's lock, cached on disk by content.

    Only an ``entry`` can be called from Python: for the others nothing is compiled that would take Python's
    objects apart, which takes long for tuples of many fields.
    """

    def decorate(function: Callable) -> Callable:
        threads = _PRANGE_ALONE if parallel else False
        dispatcher = numba.njit(nogil=True, parallel=threads, error_model="numpy", no_cfunc_wrapper=True,
                                no_cpython_wrapper=not entry)(function)  # fmt: skip
        dispatcher._cache = _ContentCache(function)
        return dispatcher

    return decorate if function is None else decorate(function)
