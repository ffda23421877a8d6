"""``avx512f``: float32 multiply-add on 32 registers of 512 bits, with the code of any x86-64-v4 machine."""

from __future__ import annotations

from dataclasses import replace

from . import generic
from .generic import AVX512_BLOCKS
from .host import Host
from .record import Isa

NEEDED = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
CPU = "x86-64-v4"
# Left alone it would be kept to vectors of 256 bits.
FEATURES = "-prefer-256-bit"


def runs_on(host: Host) -> bool:
    """x86-64-v4's vectors, switched on by the operating system."""
    return host.features >= NEEDED


def record(host: Host) -> Isa:
    """The same record, and so the same bits, on every machine that has it."""
    return replace(generic.record(host), name="avx512f", cpu=CPU, features=FEATURES, blocks=AVX512_BLOCKS)
