"""Element formats and elementary functions on float32 vectors, as portable LLVM text with numpy twins.

Every emitter takes the vector's width, so that the same text serves a whole vector and, with width 1, the
last elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..isa import Isa, PowerOps
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


def emit_bfloat16s(f: Function, isa: Isa, low: str, high: str, order: list[int]) -> str:
    """Two vectors rounded to bfloat16, the elements of both in that order, as words of 16 bits.

    By the instruction where there is one, which flushes subnormal numbers.
    """
    both = f"<{2 * isa.vector_width} x i16>"
    indices = ", ".join(f"i32 {n}" for n in order)
    if isa.narrow is not None:
        rounded = f.operation(isa.narrow.text, low=low, high=high)
        words = f.value(f"bitcast <{2 * isa.vector_width} x bfloat> {rounded} to {both}")
        return f.value(f"shufflevector {both} {words}, {both} poison, <{len(order)} x i32> <{indices}>")
    half = f"<{isa.vector_width} x i16>"
    parts = [BFLOAT16.emit_narrow(f, isa.vector_width, x) for x in (low, high)]
    return f.value(f"shufflevector {half} {parts[0]}, {half} {parts[1]}, <{len(order)} x i32> <{indices}>")


def emit_exp2(f: Function, isa: Isa, x: str) -> str:
    """2**x for x <= 0, of a whole vector; NaN stays NaN, and below -127 it is exactly 0."""
    return emit_exp2_of_bits(f, isa.vector_width, x) if isa.power is None else _emit_exp2_by(f, isa, isa.power, x)


def _emit_exp2_by(f: Function, isa: Isa, power: PowerOps, x: str) -> str:
    """By the instructions for powers of two; 0 from below -126 on, infinities included. NaN is kept."""
    kind = f"<{isa.vector_width} x float>"
    keep = f.value(f"fcmp uge {kind} {x}, {constant(isa.vector_width, EXP2_FLOOR + 1)}")
    whole = f.operation(power.round_off.text, x=x)
    fraction = f.value(f"fsub {kind} {x}, {whole}")
    return f.operation(power.scale.text, x=_emit_polynomial(f, isa.vector_width, fraction), n=whole, keep=keep)


def _emit_polynomial(f: Function, width: int, fraction: str) -> str:
    """2**fraction, in [-0.5, 0.5], by Horner's rule."""
    result = constant(width, EXP2_COEFFICIENTS[-1])
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        result = multiply_add(f, width, result, fraction, constant(width, coefficient))
    return result


def emit_exp2_of_bits(f: Function, width: int, x: str) -> str:
    """By integer arithmetic on the exponent.

    The scale 2**n is built from n's bits, where n = -127 gives 0. Comparisons are written so that NaN takes
    the untouched operand.
    """
    kind, bits = f"<{width} x float>", f"<{width} x i32>"
    low = f.value(f"fcmp olt {kind} {x}, {constant(width, EXP2_FLOOR)}")
    x = f.value(f"select <{width} x i1> {low}, {kind} {constant(width, EXP2_FLOOR)}, {kind} {x}")
    shifted = f.value(f"fadd {kind} {x}, {constant(width, ROUND_MAGIC)}")
    whole = f.value(f"fsub {kind} {shifted}, {constant(width, ROUND_MAGIC)}")
    fraction = f.value(f"fsub {kind} {x}, {whole}")
    result = _emit_polynomial(f, width, fraction)
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


@dataclass(frozen=True)
class _SmallFloat:
    """A binary format of at most 16 bits with subnormals, by its fields.

    ``first_special`` is the first magnitude that is not a finite number; ``specials`` says what these are in
    float32: its infinity and NaNs (bits put under the largest exponent), or one NaN. ``overflow`` is the
    magnitude that too large numbers become: an infinity, or the largest finite one where stores saturate.
    """

    num_bits: int
    mantissa_bits: int
    bias: int
    first_special: int
    has_infinity: bool
    nan: int
    overflow: int
    first_overflow: float

    @property
    def sign(self) -> int:
        """The sign's bit."""
        return 1 << (self.num_bits - 1)

    def emit_widen(self, f: Function, width: int, x: str) -> str:
        """Shift into float32's fields and multiply by the biases' ratio: exact, subnormals included."""
        bits, kind = f"<{width} x i32>", f"<{width} x float>"
        wide = f.value(f"zext <{width} x i{self.num_bits}> {x} to {bits}")
        magnitude = f.value(f"and {bits} {wide}, {integers(width, self.sign - 1)}")
        sign = f.value(f"and {bits} {wide}, {integers(width, self.sign)}")
        sign = f.value(f"shl {bits} {sign}, {integers(width, 32 - self.num_bits)}")
        shifted = f.value(f"shl {bits} {magnitude}, {integers(width, 23 - self.mantissa_bits)}")
        small = f.value(f"bitcast {bits} {shifted} to {kind}")
        scaled = f.value(f"fmul {kind} {small}, {constant(width, 2.0 ** (127 - self.bias))}")
        finite = f.value(f"bitcast {kind} {scaled} to {bits}")
        special = integers(width, 0x7FC00000)
        if self.has_infinity:
            special = f.value(f"or {bits} {shifted}, {integers(width, 0x7F800000)}")
        top = f.value(f"icmp uge {bits} {magnitude}, {integers(width, self.first_special)}")
        chosen = f.value(f"select <{width} x i1> {top}, {bits} {special}, {bits} {finite}")
        return f.value(f"bitcast {bits} {f.value(f'or {bits} {chosen}, {sign}')} to {kind}")

    def emit_narrow(self, f: Function, width: int, x: str) -> str:
        """Round to nearest even: normals in integers, subnormals by an addition, the rest by cases."""
        bits, kind = f"<{width} x i32>", f"<{width} x float>"
        shift = 23 - self.mantissa_bits
        raw = f.value(f"bitcast {kind} {x} to {bits}")
        magnitude = f.value(f"and {bits} {raw}, {integers(width, 0x7FFFFFFF)}")
        sign = f.value(f"xor {bits} {raw}, {magnitude}")
        sign = f.value(f"lshr {bits} {sign}, {integers(width, 32 - self.num_bits)}")
        # Normal results: rebias the exponent, and round half to even where the mantissa is cut.
        odd = f.value(f"lshr {bits} {magnitude}, {integers(width, shift)}")
        odd = f.value(f"and {bits} {odd}, {integers(width, 1)}")
        rebias = (self.bias - 127 << 23) + (1 << (shift - 1)) - 1
        normal = f.value(f"add {bits} {magnitude}, {integers(width, rebias)}")
        normal = f.value(f"lshr {bits} {f.value(f'add {bits} {normal}, {odd}')}, {integers(width, shift)}")
        # Subnormal results: a number whose last place is theirs, so that adding it rounds there.
        aligner = np.float32(2.0 ** (24 - self.bias - self.mantissa_bits))
        absolute = f.value(f"bitcast {bits} {magnitude} to {kind}")
        sum_ = f.value(f"fadd {kind} {absolute}, {constant(width, float(aligner))}")
        small = f.value(f"bitcast {kind} {sum_} to {bits}")
        small = f.value(f"sub {bits} {small}, {integers(width, int(aligner.view(np.uint32)))}")
        is_small = f.value(f"icmp ult {bits} {magnitude}, {integers(width, 128 - self.bias << 23)}")
        result = f.value(f"select <{width} x i1> {is_small}, {bits} {small}, {bits} {normal}")
        edge = int(np.float32(self.first_overflow).view(np.uint32))
        is_large = f.value(f"icmp uge {bits} {magnitude}, {integers(width, edge)}")
        overflow = integers(width, self.overflow)
        result = f.value(f"select <{width} x i1> {is_large}, {bits} {overflow}, {bits} {result}")
        nan = f.value(f"fcmp uno {kind} {x}, {x}")
        result = f.value(f"select <{width} x i1> {nan}, {bits} {integers(width, self.nan)}, {bits} {result}")
        return f.value(f"trunc {bits} {f.value(f'or {bits} {result}, {sign}')} to <{width} x i{self.num_bits}>")


# float16 overflows to infinity from 65520 on, the middle between its largest number and 65536; the fp8
# formats saturate at their largest number, infinities included.
_FLOAT16 = _SmallFloat(16, 10, 15, 0x7C00, True, 0x7E00, 0x7C00, 65520.0)
_FLOAT8_E4M3FN = _SmallFloat(8, 3, 7, 0x7F, False, 0x7F, 0x7E, 448.0)
_FLOAT8_E5M2 = _SmallFloat(8, 2, 15, 0x7C, True, 0x7E, 0x7B, 57344.0)

FLOAT32 = ElementFormat("float32", "float", 4, _same, _same)
FLOAT16 = ElementFormat("float16", "i16", 2, _FLOAT16.emit_widen, _FLOAT16.emit_narrow)
BFLOAT16 = ElementFormat("bfloat16", "i16", 2, _widen_bfloat16, _narrow_bfloat16)
FLOAT8_E4M3FN = ElementFormat("float8_e4m3fn", "i8", 1, _FLOAT8_E4M3FN.emit_widen, _FLOAT8_E4M3FN.emit_narrow)
FLOAT8_E5M2 = ElementFormat("float8_e5m2", "i8", 1, _FLOAT8_E5M2.emit_widen, _FLOAT8_E5M2.emit_narrow)
FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
FLOAT8S = (FLOAT8_E4M3FN, FLOAT8_E5M2)
FORMATS = (*FLOATS, *FLOAT8S)
# The formats that numpy lacks as ml_dtypes casts to them: without saturation, from the middle to the number that would
# come next on. That is NaN where there is no infinity, and 464 itself, a tie, still goes to 448.
_CAST_E4M3FN = replace(_FLOAT8_E4M3FN, overflow=0x7F, first_overflow=464 + 2.0**-15)
_CAST_E5M2 = replace(_FLOAT8_E5M2, overflow=0x7C, first_overflow=61440.0)
CASTS = (
    BFLOAT16,
    replace(FLOAT8_E4M3FN, emit_narrow=_CAST_E4M3FN.emit_narrow),
    replace(FLOAT8_E5M2, emit_narrow=_CAST_E5M2.emit_narrow),
)
