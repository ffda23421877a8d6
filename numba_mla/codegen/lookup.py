"""Codes of 8 bits to bfloat16 by looking them up, CODES at once: by all bits but the sign, in tables in registers.

The tables of scaled codes are made where they are used: a scale multiplies the subnormal numbers and the significands
of two exponents, and further exponents are added, so that no code is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ..isa import Isa
from .text import Function
from .vector import FLOAT8_E4M3FN, ElementFormat, literal

# Codes that are looked up together.
CODES = 64
# Codes without a sign, of which a table has one byte each.
_ENTRIES = 128
# Codes of e4m3fn of the same exponent and sign.
_SIGNIFICANDS = 8
_BYTES, _WORDS = f"<{CODES} x i8>", f"<{CODES // 2} x i16>"
# The bits of scales, float32, with which no product of a finite code leaves bfloat16's normal numbers: 2**-100, 2**100.
LEAST_SCALE, SCALES_END = ((127 + exponent) << 23 for exponent in (-100, 100))


class Tables(NamedTuple):
    """Upper and lower bytes of bfloat16, each as two vectors."""

    upper: tuple[str, str]
    lower: tuple[str, str]


def looks_up(isa: Isa) -> bool:
    """Whether a record's codes can be looked up, and what they become rounded two vectors at once."""
    return isa.look_up is not None and isa.narrow is not None


def element_tables(element: ElementFormat) -> Tables:
    """The tables of an element type, which are constants."""
    words = _magnitudes(element).view(np.uint16)
    upper, lower = ((_bytes(part[:CODES]), _bytes(part[CODES:])) for part in (words >> 8, words & 0xFF))
    return Tables(upper, lower)


def _magnitudes(element: ElementFormat) -> np.ndarray:
    """What all codes without a sign stand for, (128,) of bfloat16."""
    return np.arange(_ENTRIES, dtype=np.uint8).view(getattr(ml_dtypes, element.name)).astype(ml_dtypes.bfloat16)


def emit_scaled_tables(f: Function, isa: Isa, scale: str) -> Tables:
    """The tables of e4m3fn codes times ``scale``, ``<16 x float>``, rounded to bfloat16 once.

    For scales of bits in [LEAST_SCALE, SCALES_END): a product's significand is then rounded alike whatever its
    exponent. Two exponents further on only the upper byte of bfloat16 is another, by one.
    """
    assert isa.narrow is not None
    kind = f"<{isa.vector_width} x float>"
    # Subnormal numbers, normal ones of the first two exponents, and NaN: a row of significands each.
    multiplied = np.full(CODES // 2, np.nan, np.float32)
    multiplied[: 3 * _SIGNIFICANDS] = _magnitudes(FLOAT8_E4M3FN)[: 3 * _SIGNIFICANDS]
    low, high = (
        f.value(f"fmul {kind} {scale}, <{', '.join(f'float {literal(x)}' for x in part)}>")
        for part in multiplied.reshape(2, -1)
    )
    rounded = f.value(f"bitcast <{CODES // 2} x bfloat> {f.operation(isa.narrow.text, low=low, high=high)} to {_BYTES}")
    entries = np.arange(_ENTRIES)
    exponents, significands = np.divmod(entries, _SIGNIFICANDS)
    rows = np.where(exponents == 0, 0, 2 - exponents % 2)
    words, further = _SIGNIFICANDS * rows + significands, np.maximum(exponents - 1, 0) // 2
    words[-1], further[-1] = 3 * _SIGNIFICANDS, 0
    lower, upper = ([_shuffle(f, _BYTES, rounded, "poison", 2 * words[half] + odd) for half in np.split(entries, 2)]
                    for odd in (0, 1))  # fmt: skip
    upper = [f.value(f"add {_BYTES} {x}, {_bytes(n)}") for x, n in zip(upper, np.split(further, 2), strict=True)]
    return Tables((upper[0], upper[1]), (lower[0], lower[1]))


def emit_words(f: Function, isa: Isa, tables: Tables, codes: str) -> list[str]:
    """The bfloat16 of CODES of them, in order, as two halves.

    The upper and the lower bytes are looked up apart, and then interleaved, which goes by 128 bits: the codes are
    put in order for it before.
    """
    lanes = [(lane, half) for lane in range(CODES // 16) for half in range(2)]
    order = [CODES // 2 * half + 8 * lane + n for lane, half in lanes for n in range(8)]
    codes = _shuffle(f, _BYTES, codes, "poison", order)
    sign = f.value(f"and {_BYTES} {codes}, {_bytes([0x80] * CODES)}")
    upper, lower = (_look_up(f, isa, codes, table) for table in tables)
    upper = f.value(f"or {_BYTES} {upper}, {sign}")
    halves = []
    for half in range(2):
        picked = [16 * lane + 8 * half + n for lane in range(CODES // 16) for n in range(8)]
        both = _shuffle(f, _BYTES, lower, upper, [place for n in picked for place in (n, CODES + n)])
        halves.append(f.value(f"bitcast {_BYTES} {both} to {_WORDS}"))
    return halves


def _look_up(f: Function, isa: Isa, codes: str, table: tuple[str, str]) -> str:
    assert isa.look_up is not None
    return f.operation(isa.look_up.text, first=table[0], codes=codes, second=table[1])


def _shuffle(f: Function, kind: str, a: str, b: str, order: Iterable[int]) -> str:
    indices = [f"i32 {n}" for n in order]
    return f.value(f"shufflevector {kind} {a}, {kind} {b}, <{len(indices)} x i32> <{', '.join(indices)}>")


def _bytes(values: Iterable[int]) -> str:
    return "<" + ", ".join(f"i8 {int(value)}" for value in values) + ">"
