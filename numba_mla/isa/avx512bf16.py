"""``avx512bf16``: dot products of pairs of bfloat16 (vdpbf16ps) on registers of 512 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from . import avx512f
from .fma import BROADCAST
from .host import Host
from .record import Blocks, Isa, TileOp

_FEATURE = "avx512bf16"
CPU = avx512f.CPU
FEATURES = f"{avx512f.FEATURES},+{_FEATURE}"


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers as zeros, as the dot instructions read and write them."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def pairs(x: np.ndarray) -> np.ndarray:
    """Dot steps in the bits of float32, (..., n), as flushed numbers (..., n, 2)."""
    numbers = flushed(np.ascontiguousarray(x).view(ml_dtypes.bfloat16).astype(np.float32))
    return numbers.reshape(*x.shape, 2)


def _dot_pairs(a: np.ndarray, b: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """acc + a[1] b[1], then + a[0] b[0], each a fused multiply-add on flushed numbers."""
    left, right, total = pairs(a), pairs(b), flushed(acc)
    for element in (1, 0):
        product = left[..., element].astype(np.float64) * right[..., element]
        total = flushed((product + total).astype(np.float32))
    return total


MULTIPLY_ADD = TileOp(
    text="""\
  {result}_a = bitcast <{width} x float> {a} to <{half} x bfloat>
  {result}_b = bitcast <{width} x float> {b} to <{half} x bfloat>
  {result} = call <{width} x float> @llvm.x86.avx512bf16.dpbf16ps.512(
    <{width} x float> {acc}, <{half} x bfloat> {result}_a, <{half} x bfloat> {result}_b)
""",
    declarations=(
        "declare <{width} x float> @llvm.x86.avx512bf16.dpbf16ps.512("
        "<{width} x float>, <{half} x bfloat>, <{half} x bfloat>)",
    ),
    twin=_dot_pairs,
)


def runs_on(host: Host) -> bool:
    """avx512f's machines with the bfloat16 extension."""
    return avx512f.runs_on(host) and _FEATURE in host.features


def record(host: Host) -> Isa:
    """The same record, and so the same bits, on every machine that has it."""
    return Isa(
        name="avx512bf16",
        cpu=CPU,
        features=FEATURES,
        blocks=Blocks(16, score=(8, 1), value=(8, 2), weight=(4, 4)),
        k_pack=2,
        p_rounding=2.0**-8,
        native="bfloat16",
        dtypes=("bfloat16",),
        companion="avx512f",
        lane_group=64,
        broadcast=BROADCAST,
        multiply_add=MULTIPLY_ADD,
    )
