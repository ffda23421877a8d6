"""numpy arrays by the addresses of their Python objects: what they look like, and where their elements are.

Python finds the caches full of a kernel's data when the kernel ends, so that asking ten arrays for their shapes costs
a tenth of a millisecond. Compiled code that reads the same out of the objects costs nothing, and numpy's own C macros
read them so: the layout is part of its binary interface.
"""

from __future__ import annotations

import ctypes

import numpy as np

from ..checks import address
from .compile import kernel
from .memory import load_i32, load_i64

# Bytes from the beginning of an array's object: its type, which ends the head of every object, and numpy's fields.
_HEAD = object.__basicsize__
_TYPE, _DATA, _NDIM, _SHAPE, _STRIDES, _DTYPE, _FLAGS = (_HEAD + n for n in (-8, 0, 8, 16, 24, 40, 48))
_WRITEABLE = 0x0400
# Arrays of more axes are no argument of any operation.
MOST_AXES = 5
# A form: what an array looks like. Its element's bytes are written by who knows the type, and not compared.
TYPE, NDIM, DTYPE, WRITEABLE, SHAPE, STRIDES, NUM_COMPARED = 0, 1, 2, 3, 4, 4 + MOST_AXES, 4 + 2 * MOST_AXES
ITEMSIZE = NUM_COMPARED
FORM_SIZE = NUM_COMPARED + 1


def _layout_holds() -> bool:
    """Whether objects are laid out as is said above."""
    x = np.zeros((2, 3), np.int16)[:, ::2]
    here = id(x)

    def field(offset: int, kind=ctypes.c_int64) -> int:
        return kind.from_address(here + offset).value

    axes = ctypes.c_int64 * 2
    shape, strides = (tuple(axes.from_address(field(offset))) for offset in (_SHAPE, _STRIDES))
    return (
        (field(_TYPE), field(_DATA), field(_NDIM, ctypes.c_int)) == (id(np.ndarray), address(x), 2)
        and (shape, strides, field(_DTYPE)) == (x.shape, x.strides, id(x.dtype))
        and bool(field(_FLAGS, ctypes.c_int) & _WRITEABLE)
    )


if not _layout_holds():
    raise ImportError("numba_mla needs CPython and numpy with the usual layout of arrays in memory")


@kernel
def first_element(array):
    """Where an array's first element lies."""
    return load_i64(array + _DATA)


@kernel
def has_form(array, form):
    """Whether an object is an array of this form; 0, no object, has a form of zeros.

    Every object says of what type it is; only one of the form's type is looked into.
    """
    if array == 0 or form[TYPE] == 0:
        return array == 0 and form[TYPE] == 0
    if load_i64(array + _TYPE) != form[TYPE] or load_i32(array + _NDIM) != form[NDIM]:
        return False
    shape, strides = load_i64(array + _SHAPE), load_i64(array + _STRIDES)
    same = load_i64(array + _DTYPE) == form[DTYPE]
    same &= (load_i32(array + _FLAGS) & _WRITEABLE) == form[WRITEABLE]
    for axis in range(form[NDIM]):
        same &= load_i64(shape + 8 * axis) == form[SHAPE + axis]
        same &= load_i64(strides + 8 * axis) == form[STRIDES + axis]
    return same


@kernel(entry=True)
def read_forms(arrays, forms):
    """The forms of some arrays by their objects' addresses, 0 for none, into an int64 (n, FORM_SIZE) of zeros."""
    for i in range(len(arrays)):
        array = arrays[i]
        if array == 0:
            continue
        forms[i, TYPE] = load_i64(array + _TYPE)
        forms[i, NDIM] = load_i32(array + _NDIM)
        forms[i, DTYPE] = load_i64(array + _DTYPE)
        forms[i, WRITEABLE] = load_i32(array + _FLAGS) & _WRITEABLE
        shape, strides = load_i64(array + _SHAPE), load_i64(array + _STRIDES)
        for axis in range(min(MOST_AXES, forms[i, NDIM])):
            forms[i, SHAPE + axis] = load_i64(shape + 8 * axis)
            forms[i, STRIDES + axis] = load_i64(strides + 8 * axis)


@kernel
def _integer(place, num_bytes):
    return load_i64(place) if num_bytes == 8 else np.int64(load_i32(place))


@kernel
def read_integers(array, form):
    """An array of int32 or int64, (n,), as int64."""
    values = np.empty(form[SHAPE], np.int64)
    first = first_element(array)
    for i in range(len(values)):
        values[i] = _integer(first + i * form[STRIDES], form[ITEMSIZE])
    return values


@kernel
def read_table(array, form, seq_lens, block_size):
    """A block table's entries that lengths make use of, from an array (n, m), as int64; zeros after them."""
    table = np.zeros((form[SHAPE], form[SHAPE + 1]), np.int64)
    first = first_element(array)
    for r in range(len(table)):
        row = first + r * form[STRIDES]
        for i in range(min(-(-seq_lens[r] // block_size), table.shape[1])):
            table[r, i] = _integer(row + i * form[STRIDES + 1], form[ITEMSIZE])
    return table
