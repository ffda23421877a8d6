"""Calls that were checked before, known by the form of their arguments.

Python finds the caches full of a kernel's data when the kernel ends, so that every check costs several times
what it does in a loop of its own. What depends on types, shapes, strides and settings alone is therefore found
out once for each form of call; where arrays lie and what metadata hold is checked every time, compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ..checks import address

# Forms that are remembered of one operation. A server meets a few for each batch size.
_MOST = 1024

T = TypeVar("T")


def form_of(*arguments: Any) -> tuple:
    """What a call's arguments look like: all of an array but its place and its elements, anything else whole."""
    return tuple(
        [
            (type(x), x.shape, x.strides, x.dtype, x.flags.writeable) if isinstance(x, np.ndarray) else (type(x), x)
            for x in arguments
        ]
    )


class Forms(Generic[T]):
    """What was found out of calls, by their forms."""

    def __init__(self) -> None:
        self._known: dict[tuple, T] = {}

    def find(self, form: tuple) -> T | None:
        """What is known of a form; None if it is new, or holds what is no argument (and has no hash)."""
        try:
            return self._known.get(form)
        except TypeError:
            return None

    def keep(self, form: tuple, found: T) -> None:
        """Remember it; everything is forgotten when there is too much."""
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[form] = found


def extents(fields: Sequence[int], arrays: Sequence[np.ndarray | None], outputs: int) -> np.ndarray:
    """Which arrays must not meet, as ``validity.may_meet`` has it; the last ones are outputs."""
    rows = []
    for i, (field, x) in enumerate(zip(fields, arrays, strict=True)):
        if x is not None and x.size:
            start, end = np.lib.array_utils.byte_bounds(x)
            rows.append((field, address(x) - start, end - address(x), int(i >= len(arrays) - outputs)))
    return np.array(rows, np.int64).reshape(len(rows), 4)
