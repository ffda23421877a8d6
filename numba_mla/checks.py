"""Checks of arguments: each names the argument, what was expected and what came."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)

Shape = tuple[int | str, ...]

# float32's smallest normal number, and half of its largest: scores take a scale times log2(e), which must be
# finite too.
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
_LARGEST_SCALE = float(np.finfo(np.float32).max) / 2

# Kernels compare positions as int32.
MAX_POSITIONS = 2**31 - 1
_INTEGERS = (np.dtype(np.int64), np.dtype(np.int32))
# Far above what slices of one buffer take; the question is NP-hard for strides of every kind.
_OVERLAP_WORK = 100_000


def names(dtypes: Sequence[np.dtype]) -> str:
    """Names of element types, for a message."""
    return ", ".join(dict.fromkeys(str(dtype) for dtype in dtypes))


def describe(x: Any) -> str:
    """What came: dtype and shape of an array, or the type of anything else."""
    if isinstance(x, np.ndarray):
        return f"{x.dtype} array of shape {x.shape}"
    return f"{type(x).__name__} {x!r}" if isinstance(x, (int, float, str, bool)) else type(x).__name__


def check_type(name: str, value: Any, wanted: type | tuple[type, ...], word: str) -> None:
    """An object of a type, which ``word`` names with its article."""
    if not isinstance(value, wanted):
        raise TypeError(f"{name}: expected {word}, got {describe(value)}")


def check_count(name: str, value: Any, least: int) -> int:
    """An integer of at least ``least``."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an integer, got {describe(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {describe(value)}") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """A truth value, and not something that merely has one."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")
    return bool(value)


def check_scale(name: str, value: Any) -> float:
    """A factor that is finite, positive, and so in float32 too."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected a real number, got {describe(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not _SMALLEST_SCALE <= number <= _LARGEST_SCALE:
        limits = f"{_SMALLEST_SCALE:.4g} to {_LARGEST_SCALE:.4g}"
        raise ValueError(f"{name}: expected finite, positive and within {limits}, got {number}")
    return number


def check_array(name: str, x: Any, shape: Shape, dtypes: Sequence[np.dtype] = FLOAT_DTYPES) -> np.ndarray:
    """A numpy array of one of the element types whose axes have the given lengths; a word fits any length."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name}: expected a numpy array ({names(dtypes)}), got {describe(x)}")
    _check_plain(name, x)
    if x.dtype not in dtypes:
        hint = ""
        if x.dtype == np.dtype("V2") and BFLOAT16 in dtypes:
            hint = "; numpy stores bfloat16 like this: .view(ml_dtypes.bfloat16)"
        elif x.dtype == np.float64:
            hint = f"; cast it: {name}.astype(np.float32)"
        raise TypeError(f"{name}: expected {names(dtypes)}, got {describe(x)}{hint}")
    return _check_shape(name, x, shape)


def _check_shape(name: str, x: np.ndarray, shape: Shape) -> np.ndarray:
    if x.shape == shape:
        return x
    fits = x.ndim == len(shape)
    if fits:
        for wanted, found in zip(shape, x.shape, strict=True):
            fits = fits and (wanted == found or isinstance(wanted, str))
    if not fits:
        wanted = "(" + ", ".join(str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"
        raise ValueError(f"{name}: expected shape {wanted}, got {describe(x)}")
    return x


def _check_plain(name: str, x: Any) -> None:
    """No array that means more than its elements (a mask), or whose views are not arrays of any rank."""
    # numpy imports its masked arrays when they are first asked for.
    subclass = isinstance(x, np.ndarray) and type(x) not in (np.ndarray, np.memmap)
    if subclass and isinstance(x, (np.ma.MaskedArray, np.matrix)):
        raise TypeError(f"{name}: expected a plain numpy array, got {type(x).__name__} of shape {x.shape}")


def check_integers(name: str, x: Any, shape: Shape) -> np.ndarray:
    """Metadata, an integer array or list of the given shape, as a new int64 array."""
    if type(x) is np.ndarray and x.dtype in _INTEGERS:
        return _check_shape(name, np.array(x, np.int64, order="C"), shape)
    _check_plain(name, x)
    try:
        array = np.asarray(x)
    except ValueError:
        raise ValueError(f"{name}: expected a rectangular array of integers, got {describe(x)}") from None
    except Exception:
        # Whatever a foreign object raises on the way, it is not what was asked for.
        raise TypeError(f"{name}: expected int32 or int64 (an array or a list), got {describe(x)}") from None
    if array.size == 0 and not isinstance(x, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        # Integers that are too large for numpy's turn into floats or objects.
        if array.size and not isinstance(x, np.ndarray) and all(type(n) is int for n in np.asarray(x, object).flat):
            raise ValueError(f"{name}: expected values within int64's range, got {describe(x)}")
        came = describe(array) if array.ndim else describe(x)
        raise TypeError(f"{name}: expected int32 or int64 (an array or a list), got {came}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: expected values within int64's range, got {array.max()}")
    return _check_shape(name, np.array(array, np.int64, order="C"), shape)


def check_output(name: str, x: Any, shape: Shape, dtypes: Sequence[np.dtype],
                 inputs: dict[str, np.ndarray]) -> np.ndarray:  # fmt: skip
    """An array to write the result to: its shape and element type, writable, apart from the inputs."""
    check_array(name, x, shape, dtypes)
    check_writable(name, x)
    check_apart(name, x, inputs)
    return x


def check_apart(name: str, x: np.ndarray, inputs: Mapping[str, np.ndarray | None]) -> None:
    """An output that shares no memory with the inputs."""
    for other, array in inputs.items():
        if array is not None and overlap(x, array):
            raise ValueError(f"{name}: expected memory apart from {other}'s, got an array that overlaps it")


def check_writable(name: str, x: np.ndarray) -> None:
    """An array that may be written, every element in a place of its own."""
    if not x.flags.writeable:
        raise ValueError(f"{name}: expected a writable array, got a read-only {describe(x)}")
    if x.flags.c_contiguous:
        return
    # Axis after axis, from the smallest stride on: each must step over all that the ones before it span.
    span = x.itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in zip(x.strides, x.shape, strict=True)):
        if length > 1 and stride < span and x.size:
            raise ValueError(
                f"{name}: expected elements in places of their own, got {describe(x)} with strides {x.strides}"
            )
        span += stride * max(length - 1, 0)


def overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays share memory; so they do, too, where it would take too long to find out."""
    try:
        # numpy takes any number here, whatever its annotations say.
        return np.may_share_memory(a, b) and np.shares_memory(a, b, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def dense_rows(x: np.ndarray) -> np.ndarray:
    """The array itself, or a copy if its last axis is strided."""
    return x if x.strides[-1] == x.itemsize or x.shape[-1] <= 1 else np.ascontiguousarray(x)


def address(x: np.ndarray) -> int:
    """Where an array's first element lies; the caller keeps the array alive."""
    return x.ctypes.data
