"""``show_config``: what this installation runs on."""

from __future__ import annotations

import llvmlite
import ml_dtypes
import numba
import numpy as np

from ._version import __version__
from .codegen.store import cache_folder
from .parallel import num_threads, threading_layer
from .runtime import NUMERICS_VERSION, available_isas, host, select_isa


def show_config() -> dict[str, object]:
    """What calls made now would run on, and which versions they would run with.

    Returns
    -------
    dict
        ``version``; ``numerics_version``, which changes whenever a release changes any bit of a result;
        ``isa``, ``available_isas``, ``vector_bits`` and ``cpu``; ``threads`` and ``threading_layer`` ("not
        started" before the first parallel call); ``cache_folder``, where compiled code is kept; ``python``
        packages' versions under ``numba``, ``llvmlite``, ``numpy``, ``ml_dtypes``.

    Examples
    --------
    >>> import numba_mla
    >>> numba_mla.show_config()["numerics_version"]
    1
    """
    isa = select_isa()
    return {
        "version": __version__,
        "numerics_version": NUMERICS_VERSION,
        "isa": isa.name,
        "available_isas": available_isas(),
        "vector_bits": 8 * isa.vector_bytes,
        "cpu": host().cpu,
        "threads": num_threads(),
        "threading_layer": threading_layer(),
        "cache_folder": str(cache_folder()),
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
    }
