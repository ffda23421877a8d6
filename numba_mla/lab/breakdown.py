"""``breakdown``: where the time of one call goes, stage by stage, in one thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np

from ..checks import check_count
from ..codegen.native import ROW_FORMATS
from ..isa import Tiling
from ..kernels.context import build_context
from ..parallel import threads
from ..runtime import host, tiled_isa, use_table
from .timers import Timers
from .workload import LATENT, QK_DIM, ROW_WIDTH, V_DIM, Workload

QK, PV, REST = "QK", "PV", "rest"
# Functions of each stage, by name or, of families, without the element type.
STAGES = {
    "queries": ("pack", "prefetch"),
    "rows": ("list_rows", "native", "native_rows", "widen", "clear", "copy"),
    QK: ("score",),
    "mask": ("mask", "any_nonfinite"),
    "softmax": ("softmax",),
    "P transposing": ("transpose_steps",),
    "V interleave": ("interleave",),
    PV: ("weigh_values",),
    "merge": ("weigh", "blend", "scale"),
    "writing": ("finish_rows",),
}
_STAGE_OF = {name: stage for stage, names in STAGES.items() for name in names}
_ELEMENT = re.compile(rf"_({'|'.join(ROW_FORMATS)})$")


class Row(NamedTuple):
    """One stage: its seconds in one call, its share of the call, and its speed if it is a product."""

    stage: str
    seconds: float
    share: float
    gflops: float | None


@dataclass(frozen=True)
class Breakdown:
    """What ``breakdown`` measured; ``found[stage]`` is one row.

    Parameters
    ----------
    op, isa : str
        The operation and the instruction set.
    rows : tuple of Row
        Stages in the order of a call; the last is the rest, of Python and of Numba's loops.
    seconds : float
        Of the call, timers included.
    plain_seconds : float
        Of the same call without them.
    """

    op: str
    isa: str
    rows: tuple[Row, ...]
    seconds: float
    plain_seconds: float

    @property
    def overhead(self) -> float:
        """What the timers add, as a share of the call without them."""
        return self.seconds / self.plain_seconds - 1

    def __getitem__(self, stage: str) -> Row:
        for row in self.rows:
            if row.stage == stage:
                return row
        raise KeyError(f"expected one of {', '.join(row.stage for row in self.rows)}, got {stage!r}")

    def __str__(self) -> str:
        head = (
            f"{self.op} on {self.isa}, one thread: {self.seconds * 1e6:.0f} us "
            f"({self.plain_seconds * 1e6:.0f} us without timers)"
        )
        lines = [
            f"{row.stage:14} {row.seconds * 1e6:10.1f} us {row.share:7.1%}"
            + ("" if row.gflops is None else f" {row.gflops:8.1f} GFLOP/s")
            for row in self.rows
            if row.seconds > 0
        ]
        return "\n".join([head, *lines])


def breakdown(op: str, *, num_requests: int = 1, num_heads: int = 128, seq_len: int = 4096, num_new: int | None = None,
              block_size: int = 64, dtype: str = "bfloat16", isa: str | None = None, tiling: Tiling | None = None,
              repeats: int = 10) -> Breakdown:  # fmt: skip
    """Seconds of one call by stage: products, mask, softmax, interleaving, merging, packing, writing.

    ``share = cycles of the stage's functions / cycles of the call``, ``seconds = share * seconds of the call``.

    Parameters
    ----------
    op : str
        "decode", "extend" or "prefill".
    num_requests : int
        Requests, alike.
    num_heads : int
        Query heads.
    seq_len : int
        Tokens of each request, new ones included.
    num_new : int, optional
        Of extend: new tokens of each request, 64 (or all) by default; 1 in decode, all in prefill.
    block_size : int
        Rows of a page; of decode and extend.
    dtype : str
        "float32", "float16" or "bfloat16".
    isa : str, optional
        The instruction set, one of ``available_isas()``.
    tiling : Tiling, optional
        How attention is tiled, where not as the instruction set has it.
    repeats : int
        Calls, of which the fastest is shown.

    Returns
    -------
    Breakdown

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these.

    Notes
    -----
    Each function of the kernels is reached through one that reads the processor's counter before and after it: no
    kernel is another one than usual. That costs tens of cycles a call; see ``Breakdown.overhead``. What is written
    into another stage's function counts there: where values are interleaved within the product, all of it is "PV".
    The rest is Python, which finds the caches full of the last call's data, and Numba's loops. Masked scores are not
    counted as work. Sizes are DeepSeek V3's.

    Examples
    --------
    >>> from numba_mla import lab
    >>> found = lab.breakdown("decode", num_heads=16, seq_len=256, repeats=1)
    >>> round(sum(row.share for row in found.rows), 6)
    1.0
    """
    check_count("repeats", repeats, 1)
    workload = Workload(op, num_requests=num_requests, num_heads=num_heads, seq_len=seq_len, num_new=num_new,
                        block_size=block_size, dtype=dtype, isa=isa)  # fmt: skip
    record = tiled_isa(isa, dtype, tiling, one_head=op == "prefill")
    triple = host().triple
    timers, plain = Timers(record, triple), build_context(record, triple)
    with threads(1):
        with use_table(plain):
            workload.run()
        runs = [_run(workload.run, timers, plain) for _ in range(repeats)]
    plain_seconds = min(run.plain_seconds for run in runs)
    run = min(runs, key=lambda run: run.seconds)
    return Breakdown(op, record.name, _rows(run, _flops(workload)), run.seconds, plain_seconds)


class _Run(NamedTuple):
    """One call without timers and one with them: seconds of both, cycles of the latter and of its functions."""

    plain_seconds: float
    seconds: float
    cycles: int
    by_symbol: dict[str, int]


def _run(call: Callable, timers: Timers, plain: np.ndarray) -> _Run:
    with use_table(plain):
        start = perf_counter()
        call()
        plain_seconds = perf_counter() - start
    with timers.in_use():
        timers.reset()
        first, start = timers.now(), perf_counter()
        call()
        seconds, last = perf_counter() - start, timers.now()
    return _Run(plain_seconds, seconds, last - first, timers.cycles())


def _rows(run: _Run, flops: Mapping[str, int]) -> tuple[Row, ...]:
    """Cycles by function to seconds by stage; what no function took is the rest."""
    cycles = dict.fromkeys((*STAGES, REST), 0)
    for symbol, spent in run.by_symbol.items():
        cycles[_STAGE_OF.get(_ELEMENT.sub("", symbol), REST)] += spent
    cycles[REST] += run.cycles - sum(run.by_symbol.values())
    rows = []
    for stage, spent in cycles.items():
        seconds = spent / run.cycles * run.seconds
        gflops = flops[stage] / seconds * 1e-9 if stage in flops and seconds > 0 else None
        rows.append(Row(stage, seconds, spent / run.cycles, gflops))
    return tuple(rows)


def _flops(workload: Workload) -> dict[str, int]:
    """Floating point operations of both products."""
    widths = (QK_DIM, V_DIM) if workload.op == "prefill" else (ROW_WIDTH, LATENT)
    return {stage: workload.flops // sum(widths) * width for stage, width in zip((QK, PV), widths, strict=True)}
