"""``amx_bf16``: dot products of pairs of bfloat16 on tile operands (tdpbf16ps); vectors do the rest.

Key rows are the left operand as they lie in the cache, the packed queries the right one: S^T[key, lane].
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from . import avx2, avx512bf16, avx512f, avx512vbmi, tiling
from .avx512bf16 import flushed, pairs
from .host import TILE_FEATURES, Host
from .record import Blocks, Isa, TileOps


def _dot_tiles(a: np.ndarray, b: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """acc + a . b over the steps of one tile: even and odd features summed apart, by fused multiply-adds.

    a is (16, steps) and b (steps, 16), in the bits of float32.
    """
    left, right = pairs(a), pairs(b)
    sums = np.zeros((2, *acc.shape), np.float32)
    for step in range(a.shape[1]):
        for element in (0, 1):
            product = left[:, step, None, element].astype(np.float64) * right[None, step, :, element]
            sums[element] = flushed((product + sums[element]).astype(np.float32))
    return flushed(flushed(acc) + flushed(sums[0] + sums[1]))


TILES = TileOps(
    load="call void @llvm.x86.tileloadd64(i8 {tile}, ptr {pointer}, i64 {stride})",
    store="call void @llvm.x86.tilestored64(i8 {tile}, ptr {pointer}, i64 {stride})",
    zero="call void @llvm.x86.tilezero(i8 {tile})",
    dot="call void @llvm.x86.tdpbf16ps(i8 {total}, i8 {left}, i8 {right})",
    configure="call void @llvm.x86.ldtilecfg(ptr {pointer})",
    release="call void @llvm.x86.tilerelease()",
    declarations=(
        "declare void @llvm.x86.tileloadd64(i8, ptr, i64)",
        "declare void @llvm.x86.tilestored64(i8, ptr, i64)",
        "declare void @llvm.x86.tilezero(i8)",
        "declare void @llvm.x86.tdpbf16ps(i8, i8, i8)",
        "declare void @llvm.x86.ldtilecfg(ptr)",
        "declare void @llvm.x86.tilerelease()",
    ),
    twin=_dot_tiles,
)


def runs_on(host: Host) -> bool:
    """Machines whose tiles the operating system lets this process use, or where they are emulated."""
    return host.tiles and avx2.runs_on(host)


def record(host: Host) -> Isa:
    """The tile blocks, and vectors as wide as the host has them: a tile's row is 16 float32 everywhere."""
    levels = ((avx512bf16, "avx512f"), (avx512f, "avx512f"), (avx2, "avx2"))
    vectors, companion = next(level for level in levels if level[0].runs_on(host))
    wider = () if vectors is avx2 else avx512vbmi.features(host)
    tiles = (f"+{name}" for name in sorted(TILE_FEATURES))
    return replace(
        avx512bf16.record(host),
        name="amx_bf16",
        cpu=vectors.CPU,
        features=",".join(filter(None, (vectors.FEATURES, *wider, *tiles))),
        blocks=Blocks(16, registers=8, weight=(16, 4), tiling=tiling.AMX),
        companion=companion,
        tiles=TILES,
        power=None if vectors is avx2 else avx512f.POWER,
        look_up=None if vectors is avx2 else avx512vbmi.look_up(host),
        narrow=avx512bf16.NARROW if vectors is avx512bf16 else None,
    )
