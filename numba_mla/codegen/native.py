"""Rows to the native element type, the one that products read, from every format of a cache or a weight.

A row of 656 bytes is one of 576 bfloat16: its codes times their block's scale in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

from ..isa import Isa
from ..memory import LINE
from .lookup import (
    CODES,
    LEAST_SCALE,
    SCALES_END,
    Tables,
    element_tables,
    emit_scaled_tables,
    emit_words,
    looks_up,
)
from .text import Function
from .vector import BFLOAT16, FLOAT8_E4M3FN, FLOAT8S, FLOAT32, FORMATS, ElementFormat, integers

# A row of 656 bytes: 512 e4m3fn codes, 4 float32 scales, one for each 128 of them, 64 bfloat16.
DS = "fp8_ds_mla"
DS_LATENT, DS_BLOCK, DS_ROTARY = 512, 128, 64
DS_SCALES_AT = DS_LATENT
DS_ROTARY_AT = DS_LATENT + 4 * (DS_LATENT // DS_BLOCK)
# Rows that ``native`` is written for.
ROW_FORMATS = (*(element.name for element in FORMATS), DS)


def native_format(isa: Isa) -> ElementFormat:
    """The format of a record's native type."""
    return next(known for known in FORMATS if known.name == isa.native)


def build_native(isa: Isa, name: str) -> Function:
    """One row to the native element type; ``ahead`` is a row that will be read soon, prefetched alongside."""
    f = Function(f"native_{name}", [("ptr", "target"), ("ptr", "source"), ("i64", "n"), ("ptr", "ahead")])
    _row_emitter(isa, name)(f, "%target", "%source", "%ahead", "%n")
    return f


def build_native_rows(isa: Isa, name: str) -> Function:
    """Rows to the native element type, ``ldt`` bytes apart, each followed by ``padding`` bytes of zeros.

    Arguments of the function: ``target``; ``rows``, the addresses of ``count`` rows of ``n`` elements, and
    ``ahead``, those of as many that will be read soon, prefetched alongside.
    """
    f = Function(f"native_rows_{name}", [("ptr", "target"), ("i64", "ldt"), ("ptr", "rows"), ("ptr", "ahead"),
                                         ("i64", "count"), ("i64", "n"), ("i64", "padding")])  # fmt: skip
    emit_row, size = _row_emitter(isa, name), isa.native_bytes
    row_bytes = f.value(f"mul i64 %n, {size}")
    with f.loop(0, "%count", 1) as row:
        at = f.value(f"shl i64 {row.index}, 3")
        source, ahead = (f.load("ptr", f.offset(pointers, at), align=8) for pointers in ("%rows", "%ahead"))
        target = f.offset("%target", f.value(f"mul i64 {row.index}, %ldt"))
        emit_row(f, target, source, ahead, "%n")
        end = f.offset(target, row_bytes)
        with f.loop(0, "%padding", size) as rest:
            f.store(f"i{8 * size}", "0", f.offset(end, rest.index))
    return f


def _row_emitter(isa: Isa, name: str) -> Callable[[Function, str, str, str, str], None]:
    """What writes the conversion of one row: target, source, ahead, number of elements."""
    if name == DS:
        return lambda f, target, source, ahead, n: _emit_ds_row(f, isa, native_format(isa), target, source, ahead)
    element = next(known for known in FORMATS if known.name == name)
    return lambda f, target, source, ahead, n: _emit_row(f, isa, element, native_format(isa), target, source, ahead, n)


def _emit_row(f: Function, isa: Isa, element: ElementFormat, to: ElementFormat, target: str, source: str, ahead: str,
              n: str) -> None:  # fmt: skip
    """Convert by as many elements as go together, then by vectors, then one by one."""
    start = "0"
    if isa.look_up is not None and element in FLOAT8S and to is BFLOAT16:
        start = f.value(f"and i64 {n}, {-CODES}")
        with f.loop(0, start, CODES) as part:
            places = f.value(f"shl i64 {part.index}, 1"), part.index, part.index
            here = (f.offset(pointer, at) for pointer, at in zip((target, source, ahead), places, strict=True))
            _emit_looked_up(f, isa, element_tables(element), *here)
    for width in (LINE // element.num_bytes if element is to else isa.vector_width, 1):
        stop = f.value(f"and i64 {n}, {-width}")
        with f.loop(start, stop, width) as part:
            at = f.value(f"mul i64 {part.index}, {element.num_bytes}")
            if width > 1:
                _prefetch(f, f.offset(ahead, at))
            x = f.load(f"<{width} x {element.llvm}>", f.offset(source, at))
            if element is not to:
                x = to.emit_narrow(f, width, element.emit_widen(f, width, x))
            place = f.offset(target, f.value(f"mul i64 {part.index}, {to.num_bytes}"))
            f.store(f"<{width} x {to.llvm}>", x, place)
        start = stop
    # Rows that begin anywhere have a line more than their length has.
    _prefetch(f, f.offset(ahead, f.value(f"sub i64 {f.value(f'mul i64 {n}, {element.num_bytes}')}, 1")))


def build_widen_ds(isa: Isa) -> Function:
    """A row of 656 bytes to float32, as ``rows.build_widen`` has it of other formats; ``n`` is not looked at."""
    f = Function(f"widen_{DS}", [("ptr", "target"), ("ptr", "source"), ("i64", "n"), ("ptr", "ahead")])
    _emit_ds_row(f, isa, FLOAT32, "%target", "%source", "%ahead")
    return f


def _emit_ds_row(f: Function, isa: Isa, to: ElementFormat, target: str, source: str, ahead: str) -> None:
    """A row of 656 bytes: the codes block by block, then the rest as it is."""
    scales, count = f.offset(source, DS_SCALES_AT), DS_LATENT // DS_BLOCK
    if looks_up(isa) and to is BFLOAT16:
        bits = f.load(f"<{count} x i32>", scales)
        high = f.value(f"sub <{count} x i32> {bits}, {integers(count, LEAST_SCALE)}")
        usual = f.value(f"icmp ult <{count} x i32> {high}, {integers(count, SCALES_END - LEAST_SCALE)}")
        all_usual = f.value(f"icmp eq i{count} {f.value(f'bitcast <{count} x i1> {usual} to i{count}')}, -1")
        f.branch(
            all_usual,
            lambda: _emit_looked_up_blocks(f, isa, target, source, scales, ahead),
            lambda: _emit_scaled_blocks(f, isa, to, target, source, scales, ahead),
        )
    else:
        _emit_scaled_blocks(f, isa, to, target, source, scales, ahead)
    rotary, ahead = f.offset(source, DS_ROTARY_AT), f.offset(ahead, DS_ROTARY_AT)
    _emit_row(f, isa, BFLOAT16, to, f.offset(target, DS_LATENT * to.num_bytes), rotary, ahead, str(DS_ROTARY))


def _emit_looked_up_blocks(f: Function, isa: Isa, target: str, source: str, scales: str, ahead: str) -> None:
    """The codes of a row, block by block, in tables of the block's own."""
    for block in range(DS_LATENT // DS_BLOCK):
        scale = f.load("float", f.offset(scales, 4 * block))
        tables = emit_scaled_tables(f, isa, f.splat(isa.vector_width, "float", scale))
        for at in range(DS_BLOCK * block, DS_BLOCK * (block + 1), CODES):
            _emit_looked_up(f, isa, tables, f.offset(target, 2 * at), f.offset(source, at), f.offset(ahead, at))


def _emit_looked_up(f: Function, isa: Isa, tables: Tables, target: str, source: str, ahead: str) -> None:
    """CODES of a row, in order."""
    _prefetch(f, ahead)
    codes = f.load(f"<{CODES} x i8>", source)
    for half, words in enumerate(emit_words(f, isa, tables, codes)):
        f.store(f"<{CODES // 2} x i16>", words, f.offset(target, CODES * half))


def _emit_scaled_blocks(f: Function, isa: Isa, to: ElementFormat, target: str, source: str, scales: str,
                        ahead: str) -> None:  # fmt: skip
    """The codes of a row, a vector at a time, times their block's scale."""
    with f.loop(0, DS_LATENT, isa.vector_width) as part:
        _prefetch(f, f.offset(ahead, part.index))
        codes = f.load(f"<{isa.vector_width} x i8>", f.offset(source, part.index))
        block = f.value(f"udiv i64 {part.index}, {DS_BLOCK}")
        scale = f.load("float", f.offset(scales, f.value(f"shl i64 {block}, 2")))
        here = f.offset(target, f.value(f"mul i64 {part.index}, {to.num_bytes}"))
        _emit_scaled(f, isa, to, codes, f.splat(isa.vector_width, "float", scale), here)


def _emit_scaled(f: Function, isa: Isa, to: ElementFormat, codes: str, scale: str, target: str) -> None:
    """One vector of codes times the scale, rounded to bfloat16, whatever it is stored as."""
    width = isa.vector_width
    product = f.value(f"fmul <{width} x float> {FLOAT8_E4M3FN.emit_widen(f, width, codes)}, {scale}")
    x = BFLOAT16.emit_narrow(f, width, product)
    if to is not BFLOAT16:
        x = to.emit_narrow(f, width, BFLOAT16.emit_widen(f, width, x))
    f.store(f"<{width} x {to.llvm}>", x, target)


def _prefetch(f: Function, pointer: str) -> None:
    f.do(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 2, i32 1)")
