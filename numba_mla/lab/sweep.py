"""``sweep``: every combination of some tilings and shapes, checked, then measured in turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

from ..checks import check_count, check_scale, check_type, describe
from ..isa import Tiling
from ..parallel import num_threads, threads
from .progress import Progress, shown
from .register_blocks import PRODUCTS, RegisterBlock
from .table import Table
from .timing import Peaks, Times, take_turn
from .workload import OPERATIONS, Candidate, Check, Workload

_TILING_FIELDS = frozenset(field.name for field in fields(Tiling))
_SHAPE_FIELDS = frozenset(field.name for field in fields(Workload)) - {"op"}
_TURNS = 5

_Result = TypeVar("_Result")


def sweep(op: str, grid: Mapping[str, Iterable], *, seconds: float = 0.2, progress: Progress | None = None,
          **shape: Any) -> Table:  # fmt: skip
    """Check and measure every combination of a grid's values.

    Parameters
    ----------
    op : {"decode", "extend", "prefill", "score", "value"}
        An operation, or the bare micro-kernel of one of its products on data in the nearest caches, on one thread,
        with any register block: one that would spill is refused by the operations, and measured here.
    grid : mapping of str to iterable
        Values of fields of ``Tiling``; of ``threads``; of arguments of ``Workload`` (``isa``, ``dtype``, ``seq_len``
        and so on). Of products: fields of ``Tiling``, and ``isa``.
    seconds : float
        How long each combination is measured.
    progress : callable, optional
        Told how much is done, 0 to 1, and what is under way; None: a bar in terminals and notebooks.
    **shape
        Arguments of ``Workload`` that are the same throughout.

    Returns
    -------
    Table
        A dict for each combination: the grid's values; ``median_us`` and ``best_us`` of a call; ``gflops``, and
        the ``fraction`` that it is of the peak that was measured in between; ``gbps``, bytes that must be read;
        ``error`` over its tolerance; ``same_bits`` as the default tiling's (None of products); ``refused``, the reason
        why a tiling does not fit, or None. What was not measured is None: a tiling that was refused, or a wrong result.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, before anything is measured.

    Notes
    -----
    Tilings of one shape are measured in turns. The median is that of the best of five turns.

    Examples
    --------
    >>> from numba_mla.lab import sweep
    >>> table = sweep("decode", {"key_tile": [256, 300]}, num_heads=16, seq_len=64, isa="generic", seconds=0.01)
    >>> table[0]["error"] <= 1, table[0]["same_bits"], table[1]["refused"]
    (True, True, 'kv_split 1024 is not divided by key_tile 300')
    """
    seconds = check_scale("seconds", seconds)
    cells = _cells(op, grid, shape)
    peaks = Peaks()
    rows: dict[int, dict] = {}
    with shown(progress) as tell:
        for subject in dict.fromkeys(cell.subject for cell in cells):
            group = [cell for cell in cells if cell.subject == subject]
            rows |= _measure(group, seconds, peaks, partial(tell, len(rows) / len(cells)))
    return Table(rows[n] for n in range(len(cells)))


@dataclass(frozen=True)
class _Cell:
    """One combination: its place in the table, its values, and what they come to; threads, if they are given."""

    place: int
    values: dict[str, Any]
    subject: Workload | RegisterBlock
    tiling: Tiling
    threads: int | None

    @property
    def peak(self) -> tuple[str, int]:
        """The instruction set and the number of threads whose peak it is measured by."""
        assert self.subject.isa is not None
        num = 1 if isinstance(self.subject, RegisterBlock) else self.threads
        return self.subject.isa, num_threads() if num is None else num

    def on_threads(self, call: Callable[[], _Result]) -> Callable[[], _Result]:
        """A call on the threads that are given."""
        num = self.threads
        if num is None:
            return call

        def called() -> _Result:
            with threads(num):
                return call()

        return called

    def row(self, check: Check | None = None, refused: str | None = None, **measured: float) -> dict[str, Any]:
        """A row of the table."""
        error, same_bits = (None, None) if check is None else check
        found = dict.fromkeys(("median_us", "best_us", "gflops", "fraction", "gbps")) | measured
        return {**self.values, **found, "error": error, "same_bits": same_bits, "refused": refused}


def _cells(op: str, grid: Mapping[str, Iterable], shape: Mapping[str, Any]) -> list[_Cell]:
    """All combinations, the last name of the grid running fastest."""
    if op not in (*OPERATIONS, *PRODUCTS):
        raise ValueError(f"op: expected one of {', '.join(map(repr, (*OPERATIONS, *PRODUCTS)))}, got {op!r}")
    check_type("grid", grid, Mapping, "a dict of lists")
    own = {"isa"} if op in PRODUCTS else {*_SHAPE_FIELDS, "threads"}
    for name, values in grid.items():
        if name not in own | _TILING_FIELDS:
            raise ValueError(f"grid: expected names of {', '.join(sorted(own | _TILING_FIELDS))}, got {name!r}")
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"grid: expected a list of values for {name}, got {describe(values)}")
    for name in shape:
        if name not in own - grid.keys():
            raise ValueError(f"shape: expected names of {', '.join(sorted(own - grid.keys()))}, got {name!r}")
    combinations = itertools.product(*map(list, grid.values()))
    # Equal workloads are one: their inputs and their reference are made once.
    made: dict[Any, Any] = {}
    return [_cell(op, n, dict(zip(grid, values, strict=True)), shape, made) for n, values in enumerate(combinations)]


def _cell(op: str, place: int, values: dict[str, Any], shape: Mapping[str, Any], made: dict) -> _Cell:
    tiling = Tiling(**{name: value for name, value in values.items() if name in _TILING_FIELDS})
    arguments = {**shape, **{name: value for name, value in values.items() if name not in _TILING_FIELDS}}
    num = arguments.pop("threads", None)
    subject = RegisterBlock(op, **arguments) if op in PRODUCTS else Workload(op, **arguments)
    return _Cell(place, values, made.setdefault(subject, subject), tiling,
                 None if num is None else check_count("threads", num, 1))  # fmt: skip


def _measure(cells: list[_Cell], seconds: float, peaks: Peaks, tell: Callable[[str], None]) -> dict[int, dict]:
    """Rows by their places, of combinations that share their inputs."""
    rows: dict[int, dict] = {}
    right: list[tuple[_Cell, Candidate, Check]] = []
    for cell in cells:
        tell(f"checking {cell.tiling}")
        try:
            candidate = cell.subject.candidate(cell.tiling)
        except ValueError as error:
            rows[cell.place] = cell.row(refused=str(error).rpartition("): ")[2])
            continue
        check = cell.on_threads(candidate.check)()
        if check.is_right(cell.tiling):
            right.append((cell, candidate, check))
        else:
            rows[cell.place] = cell.row(check)
    times = [Times() for _ in right]
    best: dict[tuple[str, int], float] = {}
    for turn in range(_TURNS if right else 0):
        tell(f"turn {turn + 1} of {_TURNS}")
        take_turn([cell.on_threads(candidate.run) for cell, candidate, _ in right], times, seconds / _TURNS)
        best = {peak: peaks.gflops(*peak) for peak in dict.fromkeys(cell.peak for cell, _, _ in right)}
    for (cell, candidate, check), taken in zip(right, times, strict=True):
        gflops = candidate.flops / taken.median * 1e-9
        rows[cell.place] = cell.row(
            check, median_us=taken.median * 1e6, best_us=taken.best * 1e6, gflops=gflops,
            fraction=gflops / best[cell.peak], gbps=candidate.num_bytes / taken.median * 1e-9,
        )  # fmt: skip
    return rows
