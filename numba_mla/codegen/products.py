"""Products of whole tiles: loops over register blocks, so that a kernel makes one call for each."""

from __future__ import annotations

from collections.abc import Sequence

from ..isa import Isa
from .blocks import STREAM_AHEAD_BYTES, dot_name, emit_dot, scaled_name, store_block, value_name
from .text import Function
from .vector import constant

# Passes over lanes that each prefetch rows of another kind.
PASSES_AHEAD = 4


def loop_blocks(f: Function, total: str, sizes: Sequence[int], body, start: str | int = 0) -> None:
    """Cover ``range(start, total)`` with blocks of the given sizes, largest first; ``body(at, size)`` writes one."""
    for size in sizes:
        left = f.value(f"sub i64 {total}, {start}")
        covered = f.value(f"sub i64 {left}, {f.value(f'urem i64 {left}, {size}')}")
        stop = f.value(f"add i64 {start}, {covered}")
        with f.loop(start, stop, size) as block:
            body(block.index, size)
        start = stop


def build_score(isa: Isa) -> Function:
    """``S[key, lane] = sum_k K[key, k] Q[k, lane]``.

    Arguments of the function: ``rows``, addresses of key rows; ``ahead0`` to ``ahead3``, of rows to prefetch
    on the first passes over lanes, or null; ``keys``, whole blocks; ``q``, packed
    [step][lane]; ``lanes``, whole vectors; ``steps``; ``s``, float32 [key][lane]; ``stride``, the bytes of a step and
    of a key; ``starts``, for each block of keys the first vector of lanes that sees any of them, as all further ones
    do: scores of those before it are not computed.
    """
    f = Function("score", [("ptr", "rows"), *(("ptr", f"ahead{turn}") for turn in range(PASSES_AHEAD)),
                           ("i64", "keys"), ("ptr", "q"), ("i64", "lanes"), ("i64", "steps"), ("ptr", "s"),
                           ("i64", "stride"), ("ptr", "starts")])  # fmt: skip
    rows, most = isa.tiling.score_block
    vectors = f.value(f"udiv i64 %lanes, {isa.vector_width}")
    with f.loop(0, "%keys", rows) as key:
        at = f.value(f"shl i64 {key.index}, 3")
        here = f.offset("%rows", at)
        line = f.offset("%s", f.value(f"mul i64 {key.index}, %stride"))
        seen_from = f.load("i64", f.offset("%starts", f.value(f"udiv i64 {at}, {rows}")))
        row = [f.load("ptr", f.offset(here, 8 * r), align=8) for r in range(rows)] if isa.tiles is None else []

        def block(start: str, size: int) -> None:
            lane_bytes = f.value(f"mul i64 {start}, {isa.vector_bytes}")
            listed = _choose_ahead(f, f.value(f"udiv i64 {f.value(f'sub i64 {start}, {seen_from}')}, {most}"))
            wanted = f.value(f"icmp ne ptr {listed}, null")
            ahead = f.offset(listed, at)
            q, s = f.offset("%q", lane_bytes), f.offset(line, lane_bytes)
            if isa.tiles is not None:
                f.do(
                    f"call void @{dot_name(rows, size)}(ptr {here}, "
                    f"ptr {f.value(f'select i1 {wanted}, ptr {ahead}, ptr {here}')}, ptr {q}, i64 %stride, "
                    f"i64 %steps, ptr {s}, i64 %stride, i64 0)"
                )
                return

            def scores(ahead: str | None) -> None:
                zeros = [constant(isa.vector_width, 0.0)] * (rows * size)
                sums = emit_dot(f, isa, row, ahead, (q, "%stride"), "%steps", zeros, unroll=isa.tiling.score_unroll)
                target = [f.offset(s, f.value(f"mul i64 %stride, {r}")) for r in range(rows)]
                store_block(f, isa, target, sums, size)

            f.branch(wanted, lambda: scores(ahead), lambda: scores(None))

        loop_blocks(f, vectors, range(most, 0, -1), block, seen_from)
    return f


def _choose_ahead(f: Function, turn: str) -> str:
    """The list of rows to prefetch on that pass over lanes."""
    chosen = "null"
    for n in range(PASSES_AHEAD):
        chosen = f.value(f"select i1 {f.value(f'icmp eq i64 {turn}, {n}')}, ptr %ahead{n}, ptr {chosen}")
    return chosen


def build_weigh_values(isa: Isa) -> Function:
    """``O[lane] = O[lane] alpha[lane] + sum_key P[key, lane] V[key]``.

    Arguments of the function: ``v``, addresses of value rows, or a panel of pairs of rows with ``ldv`` bytes
    each; ``columns``, whole steps of columns; ``limits``, for each vector of lanes the keys that it takes (never
    falling; P is zero from there to the next whole step); ``p`` with ``ldp`` bytes a step; ``lanes``; ``o`` with
    ``ldo`` bytes a lane; ``alpha``; ``accumulate``, 0 to start from zero.
    """
    f = Function("weigh_values", [("ptr", "v"), ("i64", "ldv"), ("i64", "columns"), ("ptr", "limits"), ("ptr", "p"),
                                  ("i64", "ldp"), ("i64", "lanes"), ("ptr", "o"), ("i64", "ldo"), ("ptr", "alpha"),
                                  ("i64", "accumulate")])  # fmt: skip
    vectors = f.value(f"udiv i64 %columns, {isa.vector_width}")
    step = isa.k_pack * isa.granule

    def column_block(start: str, size: int) -> None:
        at = f.value(f"mul i64 {start}, {isa.native_bytes * isa.vector_width}")
        column = f.offset("%o", f.value(f"mul i64 {start}, {isa.vector_bytes}"))

        def lane_block(lane: str, lanes: int) -> None:
            lane_bytes = f.value(f"shl i64 {lane}, 2")
            p, alpha = f.offset("%p", lane_bytes), f.offset("%alpha", lane_bytes)
            o = f.offset(column, f.value(f"mul i64 {lane}, %ldo"))
            last = f.value(f"udiv i64 {f.value(f'add i64 {lane}, {lanes - 1}')}, {isa.vector_width}")
            limit = f.load("i64", f.offset("%limits", f.value(f"shl i64 {last}, 3")))
            keys = f.value(f"and i64 {f.value(f'add i64 {limit}, {step - 1}')}, {-step}")
            f.do(
                f"call void @{value_name(lanes, size)}(ptr %v, i64 %ldv, i64 {at}, i64 {keys}, ptr {p}, i64 %ldp, "
                f"ptr {o}, i64 %ldo, ptr {alpha}, i64 %accumulate)"
            )

        loop_blocks(f, "%lanes", isa.value_lanes, lane_block)

    loop_blocks(f, vectors, isa.value_vectors, column_block)
    return f


def build_multiply_rows(isa: Isa) -> Function:
    """``C[row, column] (+)= sum_k A[row, k] B[k, column]`` for one panel of packed weights.

    Arguments of the function: ``rows``, addresses of ``num_rows`` rows, and of as many as a block has after them,
    which are prefetched but not read; ``b`` with ``ldb`` bytes a step; ``steps``; ``c`` with ``ldc`` bytes a row;
    ``accumulate``, 0 to start from zero; ``soon``, as large as the panel, what will be read after it: each whole
    block of rows prefetches its share, so that weights stream evenly under their arithmetic (but for tiles, whose
    loads leave that to the hardware).
    """
    f = Function("multiply_rows", [("ptr", "rows"), ("i64", "num_rows"), ("ptr", "b"), ("i64", "ldb"), ("i64", "steps"),
                                   ("ptr", "c"), ("i64", "ldc"), ("i64", "accumulate"), ("ptr", "soon")])  # fmt: skip
    panel_bytes = f.value("mul i64 %ldb, %steps")

    most = isa.weight_rows[0]
    whole = f.value(f"sub i64 %num_rows, {f.value(f'urem i64 %num_rows, {most}')}")

    def stream(row: str, size: int) -> str:
        """Arguments of a block of rows: what it prefetches, and how many bytes of that in a step.

        Whole blocks prefetch each their share of what comes next; a single one, or the first where none is whole,
        the panel itself; the rest nothing, as their arithmetic takes less time than memory does.
        """
        if size == most:
            alone = f.value(f"icmp eq i64 %num_rows, {most}")
            start = f.offset("%soon", f.value(f"udiv i64 {f.value(f'mul i64 {panel_bytes}, {row}')}, {whole}"))
            share = f.value(f"udiv i64 {f.value(f'mul i64 %ldb, {size}')}, {whole}")
        else:
            alone = f.value(f"icmp eq i64 {row}, 0")
            start, share = "%b", "0"
        soon = f.value(f"select i1 {alone}, ptr {f.offset('%b', STREAM_AHEAD_BYTES)}, ptr {start}")
        return f"ptr {soon}, i64 {f.value(f'select i1 {alone}, i64 %ldb, i64 {share}')}"

    def block(row: str, size: int) -> None:
        here = f.offset("%rows", f.value(f"shl i64 {row}, 3"))
        c = f.offset("%c", f.value(f"mul i64 {row}, %ldc"))
        ahead = f.offset(here, 8 * size)
        streams = f", {stream(row, size)}" if isa.tiles is None else ""
        f.do(
            f"call void @{dot_name(size, isa.blocks.weight[1])}(ptr {here}, ptr {ahead}, ptr %b, i64 %ldb, i64 %steps, "
            f"ptr {c}, i64 %ldc, i64 %accumulate{streams})"
        )

    loop_blocks(f, "%num_rows", isa.weight_rows, block)
    return f


def build_multiply_scaled(isa: Isa) -> Function:
    """``C[row, column] (+)= scales[column] sum_k A[row, k] B[k, column]``, else as ``multiply_rows``.

    The sum, of a block of k, starts from zero whatever is accumulated, and is scaled as it is added.
    """
    f = Function("multiply_scaled", [("ptr", "rows"), ("i64", "num_rows"), ("ptr", "b"), ("i64", "ldb"),
                                     ("i64", "steps"), ("ptr", "c"), ("i64", "ldc"), ("ptr", "scales"),
                                     ("i64", "accumulate")])  # fmt: skip

    def block(row: str, size: int) -> None:
        here = f.offset("%rows", f.value(f"shl i64 {row}, 3"))
        c, soon = f.offset("%c", f.value(f"mul i64 {row}, %ldc")), f.offset(here, 8 * size)
        f.do(
            f"call void @{scaled_name(size, isa.blocks.weight[1])}(ptr {here}, ptr {soon}, ptr %b, i64 %ldb, "
            f"i64 %steps, ptr {c}, i64 %ldc, ptr %scales, i64 %accumulate)"
        )

    loop_blocks(f, "%num_rows", isa.weight_rows, block)
    return f
