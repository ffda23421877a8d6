"""Value rows brought together in pairs, as dot steps of two keys take them: in registers, or into a panel."""

from __future__ import annotations

from ..isa import Isa
from .text import Function


def join_pair(f: Function, isa: Isa, first: str, second: str) -> list[str]:
    """Two registers of 16-bit values of two keys as two vectors, each lane holding one column of both keys.

    On vectors these are the low and the high halves of each 128 bits, interleaved (one unpack each): the columns come
    in another order than in memory, which ``rows.load_ordered`` puts right at the end. Tiles take them in order.
    """
    width = isa.vector_width
    halves = f"<{2 * width} x i16>"
    joined = []
    for half in range(2):
        if isa.has_step_order:
            columns = [8 * lane + 4 * half + i for lane in range(width // 4) for i in range(4)]
        else:
            columns = list(range(half * width, (half + 1) * width))
        indices = ", ".join(f"i32 {c}, i32 {c + 2 * width}" for c in columns)
        pairs = f.value(f"shufflevector {halves} {first}, {halves} {second}, <{2 * width} x i32> <{indices}>")
        joined.append(f.value(f"bitcast {halves} {pairs} to <{width} x float>"))
    return joined


def build_interleave(isa: Isa) -> Function:
    """Value rows, two and two, to a panel [pair][column][2]; ``columns`` are whole pairs of vectors."""
    f = Function("interleave", [("ptr", "rows"), ("i64", "keys"), ("i64", "columns"), ("ptr", "panel"),
                                ("i64", "ldv")])  # fmt: skip
    width = 2 * isa.vector_width
    with f.loop(0, "%keys", 2) as key:
        pointers = f.offset("%rows", f.value(f"shl i64 {key.index}, 3"))
        pair = [f.load("ptr", f.offset(pointers, 8 * n), align=8) for n in range(2)]
        target = f.offset("%panel", f.value(f"mul i64 {f.value(f'lshr i64 {key.index}, 1')}, %ldv"))
        with f.loop(0, "%columns", width) as column:
            at = f.value(f"shl i64 {column.index}, 1")
            first, second = (f.load(f"<{width} x i16>", f.offset(pointer, at)) for pointer in pair)
            here = f.offset(target, f.value(f"shl i64 {column.index}, 2"))
            for half, joined in enumerate(join_pair(f, isa, first, second)):
                f.store(f"<{isa.vector_width} x float>", joined, f.offset(here, half * isa.vector_bytes))
    return f
