"""Calls that were checked before, known by their settings and by what their arrays look like.

Python finds the caches full of a kernel's data when the kernel ends, so that every check costs several times what it
does in a loop of its own. What depends on settings and on the arrays' types, shapes and strides alone is therefore
found out once for each form of call; the kernel itself holds a call's arrays to the forms that were checked then. Where
arrays lie and what metadata hold is checked every time, compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ..checks import address
from ..kernels.arrays import FORM_SIZE, ITEMSIZE, read_forms
from ..kernels.validity import DONE

# Calls that are remembered of one operation. A server meets a few for each batch size.
_MOST = 1024


class Forms(NamedTuple):
    """What the arrays of a checked call look like, as kernels compare them.

    ``named`` are the types that the numbers name by their addresses, which nothing else may come to have meanwhile.
    """

    numbers: np.ndarray
    named: tuple


class Call(Protocol):
    """A checked call: all that does not depend on where arrays lie and what they hold."""

    def complete(self, arrays: Any) -> Any:
        """The arrays, with outputs where there are none."""

    def run(self, arrays: Any) -> int:
        """Run it on such arrays: DONE, or OTHER_FORM if they do not look like the call's, and nothing was done."""


C = TypeVar("C", bound=Call)


class Prepared(NamedTuple, Generic[C]):
    """A call that was checked argument by argument, its arrays, and where the caller wants the result."""

    call: C
    arrays: Any
    out: np.ndarray


class Calls(Generic[C]):
    """An operation's checked calls: the last one with some settings, and all by what their arrays look like."""

    def __init__(self) -> None:
        self._last: dict[tuple, C] = {}
        self._known: dict[tuple, C] = {}

    def last(self, settings: tuple) -> C | None:
        """The last call with these settings; None if they are new, or hold what is no argument (and has no hash)."""
        try:
            return self._last.get(settings)
        except TypeError:
            return None

    def find(self, settings: tuple, arrays: Sequence[Any]) -> C | None:
        """The call with these settings and arrays that look like these, from now on the last one; or None."""
        if not all(x is None or isinstance(x, np.ndarray) for x in arrays):
            return None
        call = self._known.get((settings, _numbers(arrays).tobytes()))
        if call is not None:
            self._last[settings] = call
        return call

    def keep(self, settings: tuple, arrays: Sequence[Any], call: C) -> None:
        """Remember it; everything is forgotten when there is too much."""
        for kept in (self._last, self._known):
            if len(kept) >= _MOST:
                kept.clear()
        self._last[settings] = self._known[settings, _numbers(arrays).tobytes()] = call


def objects_of(arrays: Sequence[Any]) -> tuple[int, ...]:
    """Where the arrays' objects lie; 0 for None."""
    return tuple([0 if x is None else id(x) for x in arrays])


def _numbers(arrays: Sequence[Any]) -> np.ndarray:
    """What arrays look like, int64 (arrays, FORM_SIZE); nothing but arrays and None may be among them."""
    numbers = np.zeros((len(arrays), FORM_SIZE), np.int64)
    read_forms(np.array(objects_of(arrays)), numbers)
    return numbers


def forms_of(arrays: Sequence[Any]) -> Forms:
    """The forms of a call's arrays, outputs included."""
    numbers = _numbers(arrays)
    for form, x in zip(numbers, arrays, strict=True):
        form[ITEMSIZE] = 0 if x is None else x.itemsize
    return Forms(numbers, tuple((type(x), x.dtype) for x in arrays if x is not None))


def extents(fields: Sequence[int], arrays: Sequence[np.ndarray | None], outputs: int) -> np.ndarray:
    """Which arrays must not meet, as ``validity.may_meet`` has it; the last ones are outputs."""
    rows = []
    for i, (field, x) in enumerate(zip(fields, arrays, strict=True)):
        if x is not None and x.size:
            start, end = np.lib.array_utils.byte_bounds(x)
            rows.append((field, address(x) - start, end - address(x), int(i >= len(arrays) - outputs)))
    return np.array(rows, np.int64).reshape(len(rows), 4)


def serve(calls: Calls[C], settings: tuple, arrays: Any, prepare: Callable[[], Prepared[C]]) -> Any:
    """The arrays of a call that was run, its outputs among them: as the last call like it, or one seen before, or new.

    Parameters
    ----------
    calls : Calls
        The operation's.
    settings : tuple
        All arguments but the arrays.
    arrays : NamedTuple of ndarray or None
        As the caller gave them; ``out`` is one of them.
    prepare : callable
        Checks all arguments, but what metadata hold, and raises what is wrong.
    """
    call = calls.last(settings)
    if call is not None:
        complete = call.complete(arrays)
        if call.run(complete) == DONE:
            return complete
        call = calls.find(settings, arrays)
    if call is not None:
        complete = call.complete(arrays)
        out = complete.out
    else:
        call, complete, out = prepare()
        if all(given is None or given is taken for given, taken in zip(arrays, complete, strict=True)):
            calls.keep(settings, arrays, call)
    if call.run(complete) != DONE:
        raise AssertionError("arrays of the forms that were found are not of these forms")
    if out is not complete.out:
        out[...] = complete.out
    return complete._replace(out=out)
