"""``avx2``: float32 multiply-add on 16 registers of 256 bits, with the code of any x86-64-v3 machine."""

from __future__ import annotations

from dataclasses import replace

from . import generic
from .generic import AVX_BLOCKS
from .host import Host
from .record import Isa

_NEEDED = {"avx2", "fma"}
CPU = "x86-64-v3"
FEATURES = ""


def runs_on(host: Host) -> bool:
    """x86-64-v3's vectors, switched on by the operating system."""
    return host.features >= _NEEDED


def record(host: Host) -> Isa:
    """The same record, and so the same bits, on every machine that has it."""
    return replace(generic.record(host), name="avx2", cpu=CPU, features=FEATURES, blocks=AVX_BLOCKS)
