"""``kernels``: the micro-kernels of an instruction set, as an argument for compiled functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numba.core import cgutils, types
from numba.extending import NativeValue, make_attribute_wrapper, models, register_model, typeof_impl, unbox

from ..checks import BFLOAT16, describe, names
from ..kernels.compile import kernel, source_hash
from ..parallel import load_tbb
from ..runtime import context_for, select_isa

# Numba takes no arrays of float16.
_DTYPES = (np.dtype(np.float32), BFLOAT16)


class Kernels:
    """Addresses of generated functions, and sizes: of one instruction set, for one type of queries.

    Attributes
    ----------
    isa : str
        The instruction set.
    dtype : numpy.dtype
        The type of queries.
    p_rounding : float
        Unit roundoff of the probabilities that weigh values: 2^-8 where they are rounded to bfloat16, else 0.
    """

    def __init__(self, isa: str, dtype: np.dtype, p_rounding: float, table: np.ndarray) -> None:
        self.isa = isa
        self.dtype = dtype
        self.p_rounding = p_rounding
        self._table = table
        self._refusals = np.zeros(1, np.int64)

    def __repr__(self) -> str:
        return f"<kernels of {self.isa} for {self.dtype} queries>"


def kernels(dtype: Any, *, isa: str | None = None) -> Kernels:
    """The micro-kernels for queries of a type, to be passed to a compiled function.

    Parameters
    ----------
    dtype : dtype
        Of the queries: float32 or bfloat16.
    isa : str, optional
        One of ``available_isas()``; None: the one in force. Where it does not take the type, its companion does, as in
        every call of the package.

    Returns
    -------
    Kernels

    Raises
    ------
    TypeError
        For another dtype.
    IsaUnavailableError
        If this machine cannot run the instruction set.

    Notes
    -----
    Compiled code that Numba keeps on disk (``cache=True``) is compiled anew for another version of this package: the
    type of this argument is that version's. It does not depend on the instruction set.

    Examples
    --------
    >>> from numba_mla import jit
    >>> jit.kernels("float32", isa="generic")
    <kernels of generic for float32 queries>
    """
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found not in _DTYPES:
        came = describe(dtype) if found is None else found
        raise TypeError(f"dtype: expected {names(_DTYPES)}, got {came}")
    # A compiled function with a prange of its own may be the first to start Numba's threads.
    load_tbb()
    record = select_isa(isa, found.name)
    return Kernels(record.name, found, record.p_rounding, context_for(isa, found.name))


class KernelsType(types.Type):
    """Numba's type of Kernels, another one for each version of the kernels' sources."""

    def __init__(self) -> None:
        super().__init__(name=f"numba_mla.jit.Kernels({source_hash(Path(__file__).parent)})")


_INTEGERS = types.Array(types.int64, 1, "C")
_FIELDS = ("table", "refusals")


@typeof_impl.register(Kernels)
def _typeof(value, context):
    return KernelsType()


@register_model(KernelsType)
class _KernelsModel(models.StructModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, [(name, _INTEGERS) for name in _FIELDS])


for _name in _FIELDS:
    make_attribute_wrapper(KernelsType, _name, _name)


@unbox(KernelsType)
def _unbox(kind, value, c):
    struct = cgutils.create_struct_proxy(kind)(c.context, c.builder)
    is_error = cgutils.false_bit
    for name in _FIELDS:
        array = c.pyapi.object_getattr_string(value, f"_{name}")
        native = c.unbox(_INTEGERS, array)
        c.pyapi.decref(array)
        setattr(struct, name, native.value)
        is_error = c.builder.or_(is_error, native.is_error)
    return NativeValue(struct._getvalue(), is_error=is_error)


@kernel
def check(kernels):
    """Raise if a block was refused in a ``prange``, where Numba drops exceptions; to be called after it.

    Parameters
    ----------
    kernels : Kernels

    Raises
    ------
    ValueError
        If a block of this package was refused since the last check.
    """
    if kernels.refusals[0] != 0:
        kernels.refusals[0] = 0
        raise ValueError("a block was refused in a prange: compile with parallel=False to see which, and why")
