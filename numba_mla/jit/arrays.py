"""Arrays as kernels take them: their element's code, their address, and their shape checked."""

from __future__ import annotations

import numpy as np
from numba.core import types
from numba.core.errors import NumbaTypeError
from numba.extending import overload

from ..kernels.compile import kernel
from ..kernels.context import ELEMENT_CODES


def element_code(array):
    """The code of an array's elements, known when the code is compiled."""
    raise NotImplementedError("for compiled code")


@overload(element_code)
def _element_code(array):
    code = ELEMENT_CODES.get(str(array.dtype)) if isinstance(array, types.Array) else None
    if code is None:
        raise NumbaTypeError(f"expected an array of {', '.join(ELEMENT_CODES)}, got {array}")
    return lambda array: code


@kernel
def address_of(array):
    """Where an array's first element lies."""
    return np.int64(array.ctypes.data)


@kernel
def check_rows(refusals, name, array, least, most, width):
    """Rows of a width, as many as that, each contiguous."""
    rows, columns = array.shape
    if rows < least or rows > most or columns != width:
        refusals[0] += 1
        raise ValueError(f"{name}: expected shape ({least} to {most}, {width}), got ({rows}, {columns})")
    if columns > 1 and array.strides[1] != array.itemsize:
        refusals[0] += 1
        raise ValueError(f"{name}: expected a contiguous last axis, got strides of {array.strides[1]} bytes in it")


@kernel
def check_length(refusals, name, array, length):
    """One number for each lane."""
    if len(array) != length:
        refusals[0] += 1
        raise ValueError(f"{name}: expected shape ({length},), got ({len(array)},)")


@kernel
def check_that(refusals, holds, name, expected):
    """Something that must hold."""
    if not holds:
        refusals[0] += 1
        # Put together here: Numba mixes up exceptions that are passed whole, as text known to the compiler.
        raise ValueError(f"{name}: expected {expected}")
