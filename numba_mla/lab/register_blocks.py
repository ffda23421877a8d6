"""The bare micro-kernels of attention's two products, with register blocks of any size, those that spill included."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..checks import address
from ..codegen.link import link
from ..codegen.products import PASSES_AHEAD
from ..isa import Isa, Tiling, fit
from ..runtime import host, select_isa
from ..testing.inputs import normal
from ..testing.tolerance import bmm_bounds, excess
from .workload import LATENT, Candidate, Check

PRODUCTS = ("score", "value")
# Columns of a row, half of DeepSeek's: a vector of lanes' queries lies in the nearest cache beside the rows.
_WIDTH = 288
# At least: one call takes some tens of microseconds, many times what calling it does.
_KEYS, _LANES, _TILE = 4096, 64, 256
# Beyond this many sums LLVM would be busy for minutes.
_MOST_SUMS = 128


@dataclass(frozen=True)
class RegisterBlock:
    """A product's micro-kernel on data in the nearest caches, in the calling thread alone.

    Parameters
    ----------
    op : {"score", "value"}
        S = K Q, with blocks of key rows x vectors of lanes; or O = P V, with lanes x vectors of value columns.
    isa : str, optional
        An instruction set whose products run on vectors; None: the one in force.
    """

    op: str
    isa: str | None = None

    def __post_init__(self) -> None:
        if self.op not in PRODUCTS:
            raise ValueError(f"op: expected one of {', '.join(map(repr, PRODUCTS))}, got {self.op!r}")
        record = select_isa(self.isa)
        if record.tiles is not None:
            raise ValueError(f"isa: expected one whose products run on vectors, got {record.name!r}")
        object.__setattr__(self, "isa", record.name)

    def candidate(self, tiling: Tiling) -> Candidate:
        """The micro-kernel of a tiling, with data of its own.

        Raises
        ------
        ValueError
            Where there is no such block on the instruction set; one that spills is none of these.
        """
        record = _record(select_isa(self.isa), tiling, self.op)
        return (_score if self.op == "score" else _value)(record)


def _record(isa: Isa, tiling: Tiling, op: str) -> Isa:
    """The record with a tiling that may take more registers than there are."""
    record = fit(isa, tiling, may_spill=True)
    rows, vectors = record.tiling.score_block if op == "score" else record.tiling.value_block
    if rows * vectors > _MOST_SUMS:
        raise ValueError(f"tiling: expected blocks of at most {_MOST_SUMS} sums, got {rows} x {vectors}")
    return record


def _score(isa: Isa) -> Candidate:
    """``S[key, lane] = sum_k K[key, k] Q[k, lane]``; each block of keys has the same rows."""
    rows, vectors = isa.tiling.score_block
    lanes, turns = vectors * isa.vector_width, -(-_KEYS // rows)
    rng = np.random.default_rng(0)
    k, q = normal(rng, (rows, _WIDTH), isa.native), normal(rng, (lanes, _WIDTH), isa.native)
    steps = np.ascontiguousarray(k.view(np.float32)), np.ascontiguousarray(q.view(np.float32).T)
    scores = np.empty((rows * turns, lanes), np.float32)
    pointers, starts = _pointers(np.tile(_rows_of(steps[0]), turns)), np.zeros(turns, np.int64)
    nothing = [0] * (PASSES_AHEAD - 1)
    run = _bind(isa, "score", pointers, pointers, *nothing, rows * turns, steps[1], lanes, len(steps[1]), scores,
                scores.strides[0], starts)  # fmt: skip

    def check() -> Check:
        run()
        out, bound = bmm_bounds(k[None], q[None], out_dtype=np.float32)
        return Check(excess(scores.reshape(turns, rows, lanes), np.repeat(out, turns, 0), bound), None)

    return Candidate(run, check, 2 * scores.size * _WIDTH, k.nbytes + q.nbytes)


def _value(isa: Isa) -> Candidate:
    """``O[lane] = sum_key P[key, lane] V[key]``, over one key tile and all value columns."""
    most, vectors = isa.tiling.value_block
    lanes = most * -(-_LANES // most)
    columns = vectors * isa.vector_width * -(-LATENT // (vectors * isa.vector_width))
    rng = np.random.default_rng(0)
    v, p = normal(rng, (_TILE, columns), isa.native), normal(rng, (lanes, _TILE), isa.native)
    weights = np.ascontiguousarray(p.view(np.float32).T)
    out, alpha, limits = np.empty((lanes, columns), np.float32), np.ones(lanes, np.float32), np.full(lanes, _TILE)
    rows, ldv = _pointers(_rows_of(v)), 0
    if isa.separate_values:
        panel, ldv = np.empty((_TILE // 2, columns), np.float32), 4 * columns
        _bind(isa, "interleave", rows, _TILE, columns, panel, ldv)()
        rows = panel
    run = _bind(isa, "weigh_values", rows, ldv, columns, limits, weights, weights.strides[0], lanes, out,
                out.strides[0], alpha, 0, keep=(v,))  # fmt: skip

    def check() -> Check:
        run()
        expected, bound = bmm_bounds(p[None], np.ascontiguousarray(v.T)[None], out_dtype=np.float32)
        return Check(excess(out, _step_order(isa, expected[0]), _step_order(isa, bound[0])), None)

    return Candidate(run, check, 2 * out.size * _TILE, v.nbytes + p.nbytes)


def _bind(isa: Isa, name: str, *arguments: np.ndarray | int, keep: tuple = ()) -> Callable[[], object]:
    """A generated function with its arguments, arrays as their addresses, which are kept alive with it."""
    places = [ctypes.c_int64(address(x) if isinstance(x, np.ndarray) else x) for x in arguments]
    function = _prototype(len(places))(link(isa, host().triple)[name])

    def run() -> None:
        function(*places)

    run.kept = (arguments, keep)  # type: ignore[attr-defined]
    return run


@cache
def _prototype(num: int):
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num)


def _rows_of(matrix: np.ndarray) -> np.ndarray:
    """Addresses of a matrix' rows."""
    return address(matrix) + matrix.strides[0] * np.arange(len(matrix))


def _pointers(addresses: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(addresses, np.int64)


def _step_order(isa: Isa, columns: np.ndarray) -> np.ndarray:
    """Columns of sums of values in the order in which dot steps of two keys bring them."""
    if not isa.has_step_order:
        return columns
    parts = columns.reshape(len(columns), -1, isa.vector_width // 4, 2, 4)
    return parts.transpose(0, 1, 3, 2, 4).reshape(columns.shape)
