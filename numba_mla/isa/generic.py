"""``generic``: portable LLVM vectors and float32 multiply-add, on whatever the host has.

The register blocks follow the host's vectors: what matters is how many float32 lanes one holds and how many
of them there are, not which instruction set they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .host import Host
from .record import Isa, TileOp


@dataclass(frozen=True)
class _Shape:
    """float32 lanes of a vector, and the register blocks that suit the number of registers."""

    vector_width: int
    score_block: tuple[int, int]
    value_block: tuple[int, int]
    weight_block: tuple[int, int]


# Each block holds 8 to 16 sums, enough to cover a multiply-add's latency twice over, and leaves registers
# for one vector of the other operand a sum row. Scores want few vectors of lanes (a head group may be one).
_AVX512 = _Shape(16, score_block=(8, 1), value_block=(8, 2), weight_block=(4, 4))
_AVX = _Shape(8, score_block=(4, 2), value_block=(4, 2), weight_block=(4, 2))
_NEON = _Shape(4, score_block=(4, 4), value_block=(4, 4), weight_block=(4, 4))
_SSE = _Shape(4, score_block=(4, 2), value_block=(4, 2), weight_block=(4, 2))

BROADCAST = TileOp(
    text="""\
  {result}_x = load float, ptr {row}, align 4
  {result}_y = insertelement <{width} x float> poison, float {result}_x, i64 0
  {result} = shufflevector <{width} x float> {result}_y, <{width} x float> poison, <{width} x i32> zeroinitializer
""",
    declarations=(),
    twin=lambda row, width: np.full(width, row[0], dtype=np.float32),
)

MULTIPLY_ADD = TileOp(
    text="""\
  {result} = call <{width} x float> @llvm.fmuladd.v{width}f32(
    <{width} x float> {a}, <{width} x float> {b}, <{width} x float> {acc})
""",
    declarations=(
        "declare <{width} x float> @llvm.fmuladd.v{width}f32(<{width} x float>, <{width} x float>, <{width} x float>)",
    ),
    # Exact product, one rounding: what a fused multiply-add gives (float64 holds a float32 product exactly).
    twin=lambda a, b, acc: (a.astype(np.float64) * b.astype(np.float64) + acc).astype(np.float32),
)


def _shape(host: Host) -> _Shape:
    """The shape for the host's widest vectors."""
    if "avx512f" in host.features:
        return _AVX512
    if "avx" in host.features:
        return _AVX
    if host.triple.startswith(("aarch64", "arm64")):
        return _NEON
    return _SSE


def record(host: Host) -> Isa:
    """The record for this host's vectors."""
    shape = _shape(host)
    return Isa(
        name="generic",
        cpu=host.cpu,
        features=host.feature_string,
        vector_width=shape.vector_width,
        k_pack=1,
        p_rounding=0.0,
        native="float32",
        score_block=shape.score_block,
        value_block=shape.value_block,
        weight_block=shape.weight_block,
        lane_group=64,
        broadcast=BROADCAST,
        multiply_add=MULTIPLY_ADD,
    )
