"""``avx512bf16``: dot products of pairs of bfloat16 (vdpbf16ps) on registers of 512 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from . import avx512f, avx512vbmi, tiling
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


# The text of the assembler: LLVM has no pattern for the instruction's broadcast from memory, and a broadcast of
# its own costs a quarter of the speed.
MULTIPLY_ADD = TileOp(
    text="""\
  {result} = call <{width} x float> asm "vdpbf16ps $1{{1to16}}, $2, $0", "=v,*m,v,0"(
    ptr elementtype(float) {row}, <{width} x float> {b}, <{width} x float> {acc})
""",
    declarations=(),
    twin=_dot_pairs,
)

NARROW = TileOp(
    text="""\
  {result} = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> {high}, <16 x float> {low})
""",
    declarations=("declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)",),
    twin=lambda low, high: flushed(np.concatenate([low, high])).astype(ml_dtypes.bfloat16),
)


def runs_on(host: Host) -> bool:
    """avx512f's machines with the bfloat16 extension."""
    return avx512f.runs_on(host) and _FEATURE in host.features


def record(host: Host) -> Isa:
    """The same bits on every machine that has it; bytes are looked up where it can."""
    return Isa(
        name="avx512bf16",
        cpu=CPU,
        features=",".join((FEATURES, *avx512vbmi.features(host))),
        blocks=Blocks(16, registers=32, weight=(6, 4), tiling=tiling.AVX512BF16),
        k_pack=2,
        p_rounding=2.0**-8,
        native="bfloat16",
        dtypes=("bfloat16",),
        companion="avx512f",
        prefill_group=256,
        multiply_add=MULTIPLY_ADD,
        look_up=avx512vbmi.look_up(host),
        narrow=NARROW,
        power=avx512f.POWER,
    )
