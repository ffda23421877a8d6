"""Products with fp8 weights, whose codes become bfloat16 in the registers that multiply them.

For the first rows of a product: looking up is hidden in part beside their multiplying, as it uses other units too. What
they have looked up is left in memory for further rows.
"""

from __future__ import annotations

from ..isa import Isa
from .blocks import STREAM_AHEAD_BYTES, add_scaled, dot_name, emit_dot, scaled_name, start_sums, store_block
from .lookup import CODES, element_tables, emit_words, looks_up
from .products import loop_blocks
from .text import Function
from .vector import ElementFormat, constant

# Rows that are multiplied while codes are looked up: the most, which leave the weights to further rows, and fewer.
_MOST_ROWS = 4
_FEW_ROWS = (2, 1)
_UNROLL = 4


def multiplies_codes(isa: Isa) -> bool:
    """Whether a record's codes are looked up in registers: of vectors, by bytes, two vectors at once."""
    return looks_up(isa) and isa.tiles is None and isa.blocks.weight[1] % 2 == 0


def _name(element: ElementFormat, rows: int, is_scaled: bool) -> str:
    return f"dot_{'scaled_' if is_scaled else ''}codes_{rows}_{element.name}"


def build_dots(isa: Isa, element: ElementFormat) -> list[Function]:
    """The blocks that ``build_multiply_codes`` calls."""
    return [_build_dot(isa, element, rows, scaled) for rows in (_MOST_ROWS, *_FEW_ROWS) for scaled in (False, True)]


def _build_dot(isa: Isa, element: ElementFormat, rows: int, is_scaled: bool) -> Function:
    """``C[row, column] (+)= sum_k A[row, k] B[k, column]``, times the column's scale if it is scaled.

    Arguments of the function: as ``blocks.build_dot`` and ``build_dot_scaled`` have them, but ``b``, codes in the order
    of the packed weights; ``panel``, where a block of the most rows leaves what they stand for.
    """
    f = Function(
        _name(element, rows, is_scaled),
        [("ptr", "a"), ("ptr", "ahead"), ("ptr", "b"), ("i64", "k"), ("ptr", "c"), ("i64", "ldc"),
         ("i64", "accumulate"), ("ptr", "scales"), ("ptr", "panel")],
    )  # fmt: skip
    width, vectors, kind = isa.vector_width, isa.blocks.weight[1], f"<{isa.vector_width} x float>"
    start = f.value("ptrtoint ptr %b to i64")
    # The nearest cache holds the panel where one is left there.
    locality = 2 if rows == _MOST_ROWS else 3

    def look_up(packed: str) -> list[str]:
        values = []
        for part in range(vectors // 2):
            here = f.offset(packed, CODES * part)
            soon = f.offset(here, STREAM_AHEAD_BYTES)
            f.do(f"call void @llvm.prefetch.p0(ptr {soon}, i32 0, i32 {locality}, i32 1)")
            codes = f.load(f"<{CODES} x i8>", here)
            halves = emit_words(f, isa, element_tables(element), codes)
            values += [f.value(f"bitcast <{CODES // 2} x i16> {words} to {kind}") for words in halves]
        if rows == _MOST_ROWS:
            here = f.value(f"ptrtoint ptr {packed} to i64")
            at = f.value(f"shl i64 {f.value(f'sub i64 {here}, {start}')}, 1")
            for v, value in enumerate(values):
                f.store(kind, value, f.offset(f.offset("%panel", at), v * isa.vector_bytes))
        return values

    row = [f.load("ptr", f.offset("%a", 8 * r), align=8) for r in range(rows)]
    target = [f.offset("%c", f.value(f"mul i64 %ldc, {r}")) for r in range(rows)]
    sums = [constant(width, 0.0)] * (rows * vectors) if is_scaled else start_sums(f, isa, target, vectors)
    step_bytes = vectors * CODES // 2
    sums = emit_dot(f, isa, row, "%ahead", ("%b", str(step_bytes)), "%k", sums, unroll=_UNROLL, take=look_up)
    if is_scaled:
        scales = [f.load(kind, f.offset("%scales", v * isa.vector_bytes)) for v in range(vectors)]
        add_scaled(f, isa, target, sums, scales)
    else:
        store_block(f, isa, target, sums, vectors)
    return f


def build_multiply_codes(isa: Isa, element: ElementFormat, is_scaled: bool) -> Function:
    """``C[row, column] (+)= sum_k A[row, k] B[k, column]``, scaled or not, for one panel of packed codes.

    Arguments of the function: ``rows``, ``num_rows``, ``steps``, ``c``, ``ldc``, ``accumulate`` and ``scales``, which
    are looked at where it is scaled, as ``products`` has them; ``b``, the panel's codes, which are prefetched as they
    are read; ``panel``, room for what they stand for.
    """
    scaled = "scaled_" if is_scaled else ""
    f = Function(f"multiply_{scaled}codes_{element.name}",
                 [("ptr", "rows"), ("i64", "num_rows"), ("ptr", "b"), ("i64", "steps"), ("ptr", "c"), ("i64", "ldc"),
                  ("i64", "accumulate"), ("ptr", "scales"), ("ptr", "panel")])  # fmt: skip
    vectors = isa.blocks.weight[1]

    def places(row: str | int, size: int) -> tuple[str, str, str]:
        here = f.offset("%rows", f.value(f"shl i64 {row}, 3"))
        return here, f.offset(here, 8 * size), f.offset("%c", f.value(f"mul i64 {row}, %ldc"))

    def look_up(row: str | int, size: int) -> None:
        here, ahead, c = places(row, size)
        f.do(
            f"call void @{_name(element, size, is_scaled)}(ptr {here}, ptr {ahead}, ptr %b, i64 %steps, ptr {c}, "
            f"i64 %ldc, i64 %accumulate, ptr %scales, ptr %panel)"
        )

    def multiply(row: str, size: int) -> None:
        here, ahead, c = places(row, size)
        name = scaled_name(size, vectors) if is_scaled else dot_name(size, vectors)
        last = "ptr %scales, i64 %accumulate" if is_scaled else "i64 %accumulate, ptr %panel, i64 0"
        f.do(
            f"call void @{name}(ptr {here}, ptr {ahead}, ptr %panel, i64 {vectors * isa.vector_bytes}, i64 %steps, "
            f"ptr {c}, i64 %ldc, {last})"
        )

    def many() -> None:
        look_up(0, _MOST_ROWS)
        loop_blocks(f, "%num_rows", isa.weight_rows, multiply, _MOST_ROWS)

    enough = f.value(f"icmp uge i64 %num_rows, {_MOST_ROWS}")
    f.branch(enough, many, lambda: loop_blocks(f, "%num_rows", _FEW_ROWS, look_up))
    return f
