"""Rows to the native element type, the one that products read, from every format of a cache or a weight.

A row of 656 bytes is one of 576 bfloat16: its codes times their block's scale in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from ..isa import Isa
from ..memory import LINE
from .text import Function
from .vector import BFLOAT16, FLOAT8_E4M3FN, FLOAT8S, FLOAT32, FORMATS, ElementFormat, integers

# A row of 656 bytes: 512 e4m3fn codes, 4 float32 scales, one for each 128 of them, 64 bfloat16.
DS = "fp8_ds_mla"
DS_LATENT, DS_BLOCK, DS_ROTARY = 512, 128, 64
DS_SCALES_AT = DS_LATENT
DS_ROTARY_AT = DS_LATENT + 4 * (DS_LATENT // DS_BLOCK)
# Rows that ``native`` is written for.
ROW_FORMATS = (*(element.name for element in FORMATS), DS)
# Codes that are looked up together.
CODES = 64


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
            _prefetch(f, f.offset(ahead, part.index))
            codes = f.load(f"<{CODES} x i8>", f.offset(source, part.index))
            here = f.offset(target, f.value(f"shl i64 {part.index}, 1"))
            for half, words in enumerate(emit_words(f, isa, element, codes, list(range(CODES // 2)))):
                f.store(f"<{CODES // 2} x i16>", words, f.offset(here, CODES * half))
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
    fast = isa.look_up is not None and isa.narrow is not None and to is BFLOAT16
    step = CODES if fast else isa.vector_width
    with f.loop(0, DS_LATENT, step) as part:
        _prefetch(f, f.offset(ahead, part.index))
        codes = f.load(f"<{step} x i8>", f.offset(source, part.index))
        scales = f.offset(source, DS_SCALES_AT)
        block = f.value(f"udiv i64 {part.index}, {DS_BLOCK}")
        scale = f.load("float", f.offset(scales, f.value(f"shl i64 {block}, 2")))
        here = f.offset(target, f.value(f"mul i64 {part.index}, {to.num_bytes}"))
        factor = f.splat(isa.vector_width, "float", scale)
        if fast:
            _emit_scaled_words(f, isa, codes, factor, here)
        else:
            _emit_scaled(f, isa, to, codes, factor, here)
    rotary, ahead = f.offset(source, DS_ROTARY_AT), f.offset(ahead, DS_ROTARY_AT)
    _emit_row(f, isa, BFLOAT16, to, f.offset(target, DS_LATENT * to.num_bytes), rotary, ahead, str(DS_ROTARY))


def _emit_scaled(f: Function, isa: Isa, to: ElementFormat, codes: str, scale: str, target: str) -> None:
    """One vector of codes times the scale, rounded to bfloat16, whatever it is stored as."""
    width = isa.vector_width
    product = f.value(f"fmul <{width} x float> {FLOAT8_E4M3FN.emit_widen(f, width, codes)}, {scale}")
    x = BFLOAT16.emit_narrow(f, width, product)
    if to is not BFLOAT16:
        x = to.emit_narrow(f, width, BFLOAT16.emit_widen(f, width, x))
    f.store(f"<{width} x {to.llvm}>", x, target)


def _emit_scaled_words(f: Function, isa: Isa, codes: str, scale: str, target: str) -> None:
    """CODES of them, looked up, times the scale, rounded by the instruction, which flushes subnormal numbers.

    Elements a vector apart share 32 bits: a shift and a mask widen them, and products come in order.
    """
    assert isa.narrow is not None
    width, kind, bits = isa.vector_width, f"<{isa.vector_width} x float>", f"<{isa.vector_width} x i32>"
    places = [word // 2 + width * (word % 2) for word in range(2 * width)]
    for half, words in enumerate(emit_words(f, isa, FLOAT8_E4M3FN, codes, places)):
        pairs = f.value(f"bitcast <{2 * width} x i16> {words} to {bits}")
        wide = (f.value(f"shl {bits} {pairs}, {integers(width, 16)}"),
                f.value(f"and {bits} {pairs}, {integers(width, -65536)}"))  # fmt: skip
        low, high = (f.value(f"fmul {kind} {f.value(f'bitcast {bits} {x} to {kind}')}, {scale}") for x in wide)
        rounded = f.operation(isa.narrow.text, low=low, high=high)
        f.store(f"<{2 * width} x bfloat>", rounded, f.offset(target, CODES * half))


def emit_words(f: Function, isa: Isa, element: ElementFormat, codes: str, places: list[int]) -> list[str]:
    """The bfloat16 of CODES of them, as two halves: word w of each is that of the half's element ``places[w]``.

    The upper and the lower bytes are looked up apart, by all bits but the sign, and then interleaved, which goes
    by 128 bits: the codes are put in order for it before.
    """
    kind, words = f"<{CODES} x i8>", f"<{CODES // 2} x i16>"
    lanes = [(lane, half) for lane in range(CODES // 16) for half in range(2)]
    order = [CODES // 2 * half + place for lane, half in lanes for place in places[8 * lane : 8 * lane + 8]]
    codes = _shuffle(f, kind, codes, "poison", order)
    sign = f.value(f"and {kind} {codes}, {_bytes([0x80] * CODES)}")
    upper, lower = (_look_up(f, isa, codes, table) for table in _tables(element))
    upper = f.value(f"or {kind} {upper}, {sign}")
    halves = []
    for half in range(2):
        picked = [16 * lane + 8 * half + n for lane in range(CODES // 16) for n in range(8)]
        both = _shuffle(f, kind, lower, upper, [place for n in picked for place in (n, CODES + n)])
        halves.append(f.value(f"bitcast {kind} {both} to {words}"))
    return halves


def _tables(element: ElementFormat) -> np.ndarray:
    """Upper and lower bytes, (2, 128), of the bfloat16 of all codes without a sign."""
    codes = np.arange(128, dtype=np.uint8).view(getattr(ml_dtypes, element.name))
    words = codes.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.stack([words >> 8, words & 0xFF]).astype(np.uint8)


def _look_up(f: Function, isa: Isa, codes: str, table: np.ndarray) -> str:
    assert isa.look_up is not None
    return f.operation(isa.look_up.text, first=_bytes(table[:CODES]), codes=codes, second=_bytes(table[CODES:]))


def _shuffle(f: Function, kind: str, a: str, b: str, order: list[int]) -> str:
    indices = ", ".join(f"i32 {n}" for n in order)
    return f.value(f"shufflevector {kind} {a}, {kind} {b}, <{len(order)} x i32> <{indices}>")


def _bytes(values) -> str:
    return "<" + ", ".join(f"i8 {int(value)}" for value in values) + ">"


def _prefetch(f: Function, pointer: str) -> None:
    f.do(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 2, i32 1)")
