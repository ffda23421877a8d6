"""The numpy model of AMX: its rounding against exact integers, its faults against the manual."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import tile_programs
from tile_programs import random_floats

from numba_mla.testing.amx.model import fused_multiply_add

pytestmark = tile_programs.MARKS


def exact_sum(a, b, c):
    """a * b + c rounded to 24 bits with Python's integers, flushed if below 2^-126."""
    a, b, c = (np.copysign(0.0, x) if abs(x) < 2.0**-126 else float(x) for x in (a, b, c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return np.float32(a * b + c)
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent += -1 if abs(exact) < Fraction(2) ** exponent else 0
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(exact / unit) * unit  # ties to even
    if abs(rounded) < Fraction(2) ** -126:
        return np.copysign(np.float32(0), np.float32(1 if exact > 0 else -1))
    if abs(rounded) >= Fraction(2) ** 128:
        return np.float32(np.inf if exact > 0 else -np.inf)
    return np.float32(float(rounded))


@pytest.mark.parametrize("exponents", [(-20, 20), (-70, -50), (-64, -62), (62, 65), (-126, 127)])
def test_model_rounds_once_to_nearest_even(rng, exponents):
    low, high = exponents
    count = 3000
    a, b = (random_floats(rng, count, low, high).astype(ml_dtypes.bfloat16).astype(np.float32) for _ in range(2))
    c = random_floats(rng, count, max(2 * low, -130), min(2 * high, 127))
    # Half of the sums cancel to a few bits of the product's end.
    with np.errstate(over="ignore"):
        c[::2] = -(a * b)[::2] * (1 + rng.integers(-2, 3, count // 2) * np.float32(2**-23))
    c[~np.isfinite(c)] = 1
    got = fused_multiply_add(a, b, c)
    want = np.array([exact_sum(*map(float, abc)) for abc in zip(a, b, c, strict=True)], np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_model_at_the_edge_of_flushing():
    """2^-126 (1 - 2^-25) rounds up to a normal number at 24 bits; the next 24-bit number below it does not."""
    tiny, unit = np.float32(2.0**-100), np.float32(2.0**-26)
    normal = np.float32(2.0**-126)
    bits = [fused_multiply_add(np.float32(-(2.0**-76)), np.float32(2.0**-76), normal)]  # 2^-126 - 2^-152
    bits.append(fused_multiply_add(np.float32(-(2.0**-75)), np.float32(2.0**-75), normal))  # - 2^-150
    bits.append(fused_multiply_add(tiny, unit, np.float32(0)))
    assert [float(x) for x in bits] == [2.0**-126, 0.0, 2.0**-126]
    assert np.signbit(fused_multiply_add(np.float32(-(2.0**-100)), np.float32(2.0**-40), np.float32(-0.0)))
    assert not np.signbit(fused_multiply_add(np.float32(-0.0), np.float32(1), np.float32(0)))
