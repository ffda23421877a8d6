"""One measurement: an operation on some inputs, and how its result is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Case:
    """An operation on inputs that are made, into outputs that are reused.

    Parameters
    ----------
    name : str
        The shape, readable.
    isa : str
        The instruction set that computes it, whose peak it is measured by.
    problem : dict
        The inputs, for peers to take.
    outputs : tuple of ndarray
        What ``call`` fills.
    call : callable
        Runs the operation once.
    error : callable
        The largest error of what the outputs hold over its tolerance: 1 at most if it is right.
    flops, num_bytes : int
        Work of one call; bytes that it must read.
    beside : Case, optional
        The same shape in another format, measured in turn with it.
    """

    name: str
    isa: str
    problem: dict
    outputs: tuple[np.ndarray, ...]
    call: Callable[[], object]
    error: Callable[[], float]
    flops: int
    num_bytes: int
    beside: Case | None = None

    def check(self) -> dict:
        """Run twice into spoilt outputs: the error over the tolerance, and whether the bits were the same."""
        runs = [self._bits() for _ in range(2)]
        return {"error": self.error(), "same_bits": runs[0] == runs[1]}

    def _bits(self) -> list[bytes]:
        for out in self.outputs:
            out.fill(np.nan)
        self.call()
        return [out.tobytes() for out in self.outputs]


def is_right(verdict: dict) -> bool:
    """Whether a check found the result within the tolerance, and the same twice."""
    return verdict["error"] <= 1 and verdict["same_bits"]
