"""Whether a tiling fits an instruction set: what divides what, registers, tile operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .record import Isa
from .tiling import Tiling

NUM_TILES = 8


def fit(isa: Isa, tiling: Tiling, one_head: bool = False, may_spill: bool = False) -> Isa:
    """A record with a tiling laid over its own.

    Parameters
    ----------
    isa : Isa
    tiling : Tiling
    one_head : bool
        Whether rows are one head's of many.
    may_spill : bool
        Whether a register block may be larger than the registers, for somebody who wants to see what comes of it.

    Raises
    ------
    ValueError
        Where the tiling does not fit; the message says why.
    """
    base = replace(isa.tiling, lane_group=isa.prefill_group) if one_head else isa.tiling
    full = tiling.over(base)
    reasons = [*_misfits(isa, full), *(() if may_spill else _spills(isa, full))]
    if reasons:
        raise misfit(isa, tiling, reasons[0])
    return replace(isa, blocks=replace(isa.blocks, tiling=full))


def misfit(isa: Isa, tiling: Tiling, reason: str) -> ValueError:
    """The error for a tiling that does not fit."""
    return ValueError(f"tiling: expected one that fits {isa.name}, got {tiling}: {reason}")


def _misfits(isa: Isa, tiling: Tiling) -> Iterator[str]:
    """Reasons why a full tiling does not fit."""
    if tiling.lane_group % isa.vector_width:
        yield f"lane_group {tiling.lane_group} is not divided by a vector's {isa.vector_width} lanes"
    if tiling.kv_split % tiling.key_tile:
        yield f"kv_split {tiling.kv_split} is not divided by key_tile {tiling.key_tile}"
    if tiling.least_lanes > tiling.lane_group:
        yield f"least_lanes {tiling.least_lanes} are more than lane_group {tiling.lane_group}"
    for name in ("score_unroll", "value_unroll"):
        number = getattr(tiling, name)
        if number & (number - 1):
            yield f"{name} {number} is not a power of two"
    yield from _vector_misfits(isa, tiling) if isa.tiles is None else _tile_misfits(isa, tiling)


def _vector_misfits(isa: Isa, tiling: Tiling) -> Iterator[str]:
    if tiling.value_unroll % isa.k_pack:
        yield f"value_unroll {tiling.value_unroll} is not divided by the {isa.k_pack} keys of a dot step"
    vectors = tiling.value_block[1]
    if vectors % isa.k_pack:
        yield f"value_block {tiling.value_block}: its {vectors} vectors are not pairs, as two keys fill them"
    if tiling.interleave == "separate" and isa.k_pack == 1:
        yield "interleave 'separate': single values of float32 are not interleaved"


def _spills(isa: Isa, tiling: Tiling) -> Iterator[str]:
    """Blocks that are too large for the registers, whatever the compiler does."""
    if isa.tiles is not None:
        return
    for name in ("score_block", "value_block"):
        rows, vectors = getattr(tiling, name)
        if rows * vectors + vectors > isa.blocks.registers:
            yield (
                f"{name} {rows, vectors} would spill: {rows * vectors} sums and {vectors} operands for "
                f"{isa.blocks.registers} registers"
            )


def _tile_misfits(isa: Isa, tiling: Tiling) -> Iterator[str]:
    granule = isa.granule
    for name in ("score_block", "value_block"):
        rows, columns = getattr(tiling, name)
        if rows % granule:
            yield f"{name} {rows, columns} is not divided by a tile's {granule} rows"
        if rows // granule * columns + rows // granule + 1 > NUM_TILES:
            yield f"{name} {rows, columns} exceeds the {NUM_TILES} tiles, operands of a step included"
    if tiling.score_unroll != granule:
        yield f"score_unroll {tiling.score_unroll}: a tile takes {granule} steps"
    if tiling.value_unroll != granule * isa.k_pack:
        yield f"value_unroll {tiling.value_unroll}: a tile takes {granule * isa.k_pack} keys"
    if tiling.interleave != "separate":
        yield "interleave 'fused': tiles take values that are interleaved already"
