"""The tile operation of float32 multiply-add, in portable LLVM, of all instruction sets without 16-bit dots."""

from __future__ import annotations

import numpy as np

from .record import TileOp

# The broadcast from memory is folded into the multiply-add, or shared by several, as the processor has it.
MULTIPLY_ADD = TileOp(
    text="""\
  {result}_x = load float, ptr {row}, align 1
  {result}_y = insertelement <{width} x float> poison, float {result}_x, i64 0
  {result}_a = shufflevector <{width} x float> {result}_y, <{width} x float> poison, <{width} x i32> zeroinitializer
  {result} = call <{width} x float> @llvm.fmuladd.v{width}f32(
    <{width} x float> {result}_a, <{width} x float> {b}, <{width} x float> {acc})
""",
    declarations=(
        "declare <{width} x float> @llvm.fmuladd.v{width}f32(<{width} x float>, <{width} x float>, <{width} x float>)",
    ),
    # Exact product, one rounding: what a fused multiply-add gives (float64 holds a float32 product exactly).
    twin=lambda a, b, acc: (a.astype(np.float64) * b.astype(np.float64) + acc).astype(np.float32),
)
