"""Cases of bmm: products with weights that are packed once."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from case import FLOATS, Case

import numba_mla
from numba_mla import PackedWeight, reference
from numba_mla.memory import aligned_zeros
from numba_mla.runtime import select_isa
from numba_mla.testing.inputs import normal
from numba_mla.testing.tolerance import bmm_bounds, excess

# One scale for all of the weight; one for each block of 128 x 128, as checkpoints have them.
FP8, FP8_BLOCKS = "float8_e4m3fn", "fp8_blocks"
BLOCK = 128
# Copies of a weight that are read in turn hold this much together, so that no cache keeps one until its next turn.
OUT_OF_CACHE_BYTES = 1 << 29
# The reference is computed for some columns at a time: its float64 copies of a large weight would not fit.
_COLUMNS_AT_A_TIME = 8 * BLOCK


class Weight(NamedTuple):
    """Arguments of pack_weight."""

    w: np.ndarray
    scale: Any
    block_size: tuple[int, int] | None

    def dequantised(self, first: int, stop: int) -> np.ndarray:
        """Rows first to stop in float64; first at a block's boundary."""
        scale = self.scale if self.block_size is None else self.scale[:, first // BLOCK : -(-stop // BLOCK)]
        return reference.pack_weight(self.w[:, first:stop], scale=scale, block_size=self.block_size)


def bmm_label(heads: int, m: int, n: int, k: int, stored: str) -> str:
    """Name of a bmm case."""
    return f"H={heads} M={m} N={n} K={k} {stored}"


def bmm_case(heads: int, m: int, n: int, k: int, stored: str, isa: str | None = None) -> Case:
    """A product, with one row of weights out of cache; fp8 weights take bfloat16 rows, with bfloat16 beside them."""
    quantised = stored not in FLOATS
    rng = np.random.default_rng(0)
    a = normal(rng, (heads, m, k), "bfloat16" if quantised else stored)
    weight = _weight(rng, (heads, n, k), stored)
    packed = numba_mla.pack_weight(weight.w, scale=weight.scale, block_size=weight.block_size, isa=isa)
    copies = _copies(packed) if m == 1 else [packed]
    turn = cycle(copies)
    out = np.empty((heads, m, n), a.dtype)
    return Case(
        name=bmm_label(heads, m, n, k, stored),
        isa=select_isa(packed.isa, a.dtype.name).name,
        problem={"a": a, "w": weight.w, "num_copies": len(copies)},
        outputs=(out,),
        call=lambda: numba_mla.bmm(a, next(turn), out=out),
        error=lambda: _error(a, weight, out),
        flops=2 * heads * m * n * k,
        num_bytes=packed.nbytes,
        beside=bmm_case(heads, m, n, k, "bfloat16", isa) if quantised else None,
    )


def _weight(rng: np.random.Generator, shape: tuple[int, int, int], stored: str) -> Weight:
    """Random weights; block scales of very different sizes."""
    heads, n, k = shape
    if stored in FLOATS:
        return Weight(normal(rng, shape, stored), None, None)
    codes = normal(rng, shape, ml_dtypes.float8_e4m3fn)
    if stored == FP8:
        return Weight(codes, 0.037, None)
    scales = np.exp2(rng.uniform(-8, 0, (heads, -(-n // BLOCK), -(-k // BLOCK)))).astype(np.float32)
    return Weight(codes, scales, (BLOCK, BLOCK))


def _copies(packed: PackedWeight) -> list[PackedWeight]:
    """The weight as often as it takes to be out of every cache when its turn comes again."""
    copies = [packed]
    while len(copies) * packed.nbytes < OUT_OF_CACHE_BYTES:
        panels = aligned_zeros(packed.panels.shape, packed.panels.dtype)
        panels[...] = packed.panels
        copies.append(replace(packed, panels=panels))
    return copies


def _error(a: np.ndarray, weight: Weight, out: np.ndarray) -> float:
    """The largest error over the tolerance, of all columns."""
    n = out.shape[2]
    worst = 0.0
    for first in range(0, n, _COLUMNS_AT_A_TIME):
        stop = min(first + _COLUMNS_AT_A_TIME, n)
        worst = max(worst, excess(out[:, :, first:stop], *bmm_bounds(a, weight.dequantised(first, stop))))
    return worst
