"""``avx512vbmi``: look-up of bytes in registers, where the machines of AVX-512's records have it."""

from __future__ import annotations

import numpy as np

from .host import Host
from .record import TileOp

_FEATURE = "avx512vbmi"

LOOK_UP = TileOp(
    text="""\
  {result} = call <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(
    <64 x i8> {first}, <64 x i8> {codes}, <64 x i8> {second})
""",
    declarations=("declare <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8>, <64 x i8>, <64 x i8>)",),
    twin=lambda first, codes, second: np.concatenate([first, second])[codes & 127],
)


def features(host: Host) -> tuple[str, ...]:
    """What a record's features are joined by."""
    return (f"+{_FEATURE}",) if _FEATURE in host.features else ()


def look_up(host: Host) -> TileOp | None:
    """The record's look-up; None where the machine has none."""
    return LOOK_UP if _FEATURE in host.features else None
