"""``avx512f``: float32 multiply-add on 32 registers of 512 bits, with the code of any x86-64-v4 machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from . import generic
from .generic import AVX512_BLOCKS
from .host import Host
from .record import Isa, PowerOps, TileOp

NEEDED = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
CPU = "x86-64-v4"
# Left alone it would be kept to vectors of 256 bits.
FEATURES = "-prefer-256-bit"
_VECTOR = "<16 x float>"
# Operands 8 and 4 say: to the nearest, and as the control register has it.
POWER = PowerOps(
    round_off=TileOp(
        text=f"""\
  {{result}} = call {_VECTOR} @llvm.x86.avx512.mask.rndscale.ps.512(
    {_VECTOR} {{x}}, i32 8, {_VECTOR} {{x}}, i16 -1, i32 4)
""",
        declarations=(f"declare {_VECTOR} @llvm.x86.avx512.mask.rndscale.ps.512({_VECTOR}, i32, {_VECTOR}, i16, i32)",),
        twin=np.rint,
    ),
    scale=TileOp(
        text=f"""\
  {{result}}_m = bitcast <16 x i1> {{keep}} to i16
  {{result}} = call {_VECTOR} @llvm.x86.avx512.mask.scalef.ps.512(
    {_VECTOR} {{x}}, {_VECTOR} {{n}}, {_VECTOR} zeroinitializer, i16 {{result}}_m, i32 4)
""",
        declarations=(
            f"declare {_VECTOR} @llvm.x86.avx512.mask.scalef.ps.512({_VECTOR}, {_VECTOR}, {_VECTOR}, i16, i32)",
        ),
        twin=lambda x, n, keep: np.where(keep, np.ldexp(x, n.astype(np.int32)), np.float32(0)),
    ),
)


def runs_on(host: Host) -> bool:
    """x86-64-v4's vectors, switched on by the operating system."""
    return host.features >= NEEDED


def record(host: Host) -> Isa:
    """The same record, and so the same bits, on every machine that has it."""
    return replace(generic.record(host), name="avx512f", cpu=CPU, features=FEATURES, blocks=AVX512_BLOCKS, power=POWER)
