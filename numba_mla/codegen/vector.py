"""Element formats and elementary functions on float32 vectors, as portable LLVM text with numpy twins.

Every emitter takes the vector's width, so that the same text serves a whole vector and, with width 1, the
last elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .text import Function

# 2**f on [-0.5, 0.5]: a minimax fit of degree 6 (2e-9; evaluated in float32, 1.3 units in the last place)
# whose constant term is exactly 1, so that exp2(0) == 1 and an unchanged maximum rescales by exactly 1.
EXP2_COEFFICIENTS = tuple(
    float(np.float32(c)) for c in (1.0, 0.6931472, 0.24022648, 0.055503324, 0.009618437, 0.0013398875, 0.00015353362)
)
# Adding and subtracting 1.5 * 2**23 rounds a float32 of small magnitude to an integer.
ROUND_MAGIC = float(np.float32(1.5 * 2**23))
# The least exponent that exp2 still tells from 0.
EXP2_FLOOR = -127.0


def literal(value: float) -> str:
    """A float32 as LLVM writes it: the bits of the double of the same value."""
    return f"0x{np.float64(np.float32(value)).view(np.uint64):016X}"


def constant(width: int, value: float) -> str:
    """A float32 vector constant."""
    return "<" + ", ".join([f"float {literal(value)}"] * width) + ">"


def integers(width: int, value: int) -> str:
    """An i32 vector constant."""
    return "<" + ", ".join([f"i32 {value}"] * width) + ">"


def multiply_add(f: Function, width: int, a: str, b: str, c: str) -> str:
    """``a * b + c``, fused where the machine fuses."""
    kind = f"<{width} x float>"
    return f.value(f"call {kind} @llvm.fmuladd.v{width}f32({kind} {a}, {kind} {b}, {kind} {c})")


def emit_exp2(f: Function, width: int, x: str) -> str:
    """2**x for x <= 0; NaN stays NaN, and below -127 it is exactly 0.

    The scale 2**n is built from n's bits, where n = -127 gives 0. Comparisons are written so that NaN takes
    the untouched operand.
    """
    kind, bits = f"<{width} x float>", f"<{width} x i32>"
    low = f.value(f"fcmp olt {kind} {x}, {constant(width, EXP2_FLOOR)}")
    x = f.value(f"select <{width} x i1> {low}, {kind} {constant(width, EXP2_FLOOR)}, {kind} {x}")
    shifted = f.value(f"fadd {kind} {x}, {constant(width, ROUND_MAGIC)}")
    whole = f.value(f"fsub {kind} {shifted}, {constant(width, ROUND_MAGIC)}")
    fraction = f.value(f"fsub {kind} {x}, {whole}")
    result = constant(width, EXP2_COEFFICIENTS[-1])
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        result = multiply_add(f, width, result, fraction, constant(width, coefficient))
    # The low bits of `shifted` hold n; 127 << 23 is the bias of 2**0.
    exponent = f.value(f"shl {bits} {f.value(f'bitcast {kind} {shifted} to {bits}')}, {integers(width, 23)}")
    exponent = f.value(f"add {bits} {exponent}, {integers(width, 127 << 23)}")
    return f.value(f"fmul {kind} {result}, {f.value(f'bitcast {bits} {exponent} to {kind}')}")


def exp2_twin(x: np.ndarray) -> np.ndarray:
    """What ``emit_exp2`` means, in float32 numpy (products and sums rounded apart)."""
    x = np.where(x < np.float32(EXP2_FLOOR), np.float32(EXP2_FLOOR), x.astype(np.float32))
    whole = (x + np.float32(ROUND_MAGIC)) - np.float32(ROUND_MAGIC)
    fraction = x - whole
    result = np.full_like(x, EXP2_COEFFICIENTS[-1])
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        result = result * fraction + np.float32(coefficient)
    scale = np.where(whole <= EXP2_FLOOR, np.float32(0), np.exp2(whole)).astype(np.float32)
    return result * scale


@dataclass(frozen=True)
class ElementFormat:
    """How one element type becomes float32 and comes back, on vectors of any width."""

    name: str
    llvm: str
    num_bytes: int
    emit_widen: Callable[[Function, int, str], str]
    emit_narrow: Callable[[Function, int, str], str]


def _same(f: Function, width: int, x: str) -> str:
    return x


def _widen_bfloat16(f: Function, width: int, x: str) -> str:
    bits = f"<{width} x i32>"
    wide = f.value(f"zext <{width} x i16> {x} to {bits}")
    wide = f.value(f"shl {bits} {wide}, {integers(width, 16)}")
    return f.value(f"bitcast {bits} {wide} to <{width} x float>")


def _narrow_bfloat16(f: Function, width: int, x: str) -> str:
    """Round to nearest even; a NaN keeps its upper bits and is made quiet."""
    bits = f"<{width} x i32>"
    raw = f.value(f"bitcast <{width} x float> {x} to {bits}")
    upper = f.value(f"lshr {bits} {raw}, {integers(width, 16)}")
    odd = f.value(f"and {bits} {upper}, {integers(width, 1)}")
    rounded = f.value(f"add {bits} {raw}, {integers(width, 0x7FFF)}")
    rounded = f.value(f"lshr {bits} {f.value(f'add {bits} {rounded}, {odd}')}, {integers(width, 16)}")
    quiet = f.value(f"or {bits} {upper}, {integers(width, 0x40)}")
    nan = f.value(f"fcmp uno <{width} x float> {x}, {x}")
    chosen = f.value(f"select <{width} x i1> {nan}, {bits} {quiet}, {bits} {rounded}")
    return f.value(f"trunc {bits} {chosen} to <{width} x i16>")


def _widen_float16(f: Function, width: int, x: str) -> str:
    """Shift into float32's fields and multiply by 2**112: exact, subnormals included; inf and NaN put back."""
    bits, kind = f"<{width} x i32>", f"<{width} x float>"
    wide = f.value(f"zext <{width} x i16> {x} to {bits}")
    magnitude = f.value(f"and {bits} {wide}, {integers(width, 0x7FFF)}")
    sign = f.value(f"shl {bits} {f.value(f'and {bits} {wide}, {integers(width, 0x8000)}')}, {integers(width, 16)}")
    shifted = f.value(f"shl {bits} {magnitude}, {integers(width, 13)}")
    small = f.value(f"bitcast {bits} {shifted} to {kind}")
    scaled = f.value(f"fmul {kind} {small}, {constant(width, 2.0**112)}")
    finite = f.value(f"bitcast {kind} {scaled} to {bits}")
    special = f.value(f"or {bits} {shifted}, {integers(width, 0x7F800000)}")
    top = f.value(f"icmp uge {bits} {magnitude}, {integers(width, 0x7C00)}")
    chosen = f.value(f"select <{width} x i1> {top}, {bits} {special}, {bits} {finite}")
    return f.value(f"bitcast {bits} {f.value(f'or {bits} {chosen}, {sign}')} to {kind}")


def _narrow_float16(f: Function, width: int, x: str) -> str:
    """Round to nearest even: normals by integer rounding, subnormals by adding 0.5, the rest by cases."""
    bits, kind = f"<{width} x i32>", f"<{width} x float>"
    raw = f.value(f"bitcast {kind} {x} to {bits}")
    magnitude = f.value(f"and {bits} {raw}, {integers(width, 0x7FFFFFFF)}")
    sign = f.value(f"lshr {bits} {f.value(f'xor {bits} {raw}, {magnitude}')}, {integers(width, 16)}")
    # Normal results: rebias the exponent (127 -> 15) and round half to even at bit 13.
    odd = f.value(f"and {bits} {f.value(f'lshr {bits} {magnitude}, {integers(width, 13)}')}, {integers(width, 1)}")
    normal = f.value(f"add {bits} {magnitude}, {integers(width, (15 - 127 << 23) + 0xFFF)}")
    normal = f.value(f"lshr {bits} {f.value(f'add {bits} {normal}, {odd}')}, {integers(width, 13)}")
    # Subnormal results: 0.5 has float16's last place at bit 0, so the addition rounds there.
    half = constant(width, 0.5)
    sum_ = f.value(f"fadd {kind} {f.value(f'bitcast {bits} {magnitude} to {kind}')}, {half}")
    small = f.value(f"sub {bits} {f.value(f'bitcast {kind} {sum_} to {bits}')}, {integers(width, 0x3F000000)}")
    is_small = f.value(f"icmp ult {bits} {magnitude}, {integers(width, 113 << 23)}")
    result = f.value(f"select <{width} x i1> {is_small}, {bits} {small}, {bits} {normal}")
    # From 65520 on it is infinite: 65536 and above here, [65520, 65536) by the rounding's own carry.
    is_large = f.value(f"icmp uge {bits} {magnitude}, {integers(width, 143 << 23)}")
    result = f.value(f"select <{width} x i1> {is_large}, {bits} {integers(width, 0x7C00)}, {bits} {result}")
    nan = f.value(f"fcmp uno {kind} {x}, {x}")
    result = f.value(f"select <{width} x i1> {nan}, {bits} {integers(width, 0x7E00)}, {bits} {result}")
    return f.value(f"trunc {bits} {f.value(f'or {bits} {result}, {sign}')} to <{width} x i16>")


FLOAT32 = ElementFormat("float32", "float", 4, _same, _same)
FLOAT16 = ElementFormat("float16", "i16", 2, _widen_float16, _narrow_float16)
BFLOAT16 = ElementFormat("bfloat16", "i16", 2, _widen_bfloat16, _narrow_bfloat16)
FORMATS = (FLOAT32, FLOAT16, BFLOAT16)
