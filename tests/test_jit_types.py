"""bfloat16 and fp8 as Numba's scalar types: every code, every layout, arithmetic, storage; 2**x."""

import math
import subprocess
import sys

import ml_dtypes
import numba
import numpy as np
import pytest

from numba_mla import jit

TYPES = {kind.name: kind for kind in (jit.bfloat16, jit.float8_e4m3fn, jit.float8_e5m2)}


@pytest.fixture(params=TYPES)
def dtype(request):
    return np.dtype(request.param)


def bits_of(array):
    return array.view(f"u{array.itemsize}")


def all_codes(dtype):
    return np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype)


@numba.njit
def copied(source, target):
    for i in range(source.size):
        target[i] = source[i]


def assert_same_numbers(actual, expected):
    """Equal bits, but for what a NaN holds besides its sign."""
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    np.testing.assert_array_equal(bits_of(actual)[~nan], bits_of(expected)[~nan])
    np.testing.assert_array_equal(np.signbit(actual.astype(np.float32)), np.signbit(expected.astype(np.float32)))


@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_every_code_is_read_exactly(dtype, wide):
    codes = all_codes(dtype)
    target = np.empty(len(codes), wide)
    copied(codes, target)
    with np.errstate(invalid="ignore"):
        assert_same_numbers(target, codes.astype(wide))


def edges(dtype):
    """Every number of the type, what lies in the middle of two, and the float32 to either side of those."""
    with np.errstate(all="ignore"):
        numbers = np.unique(all_codes(dtype).astype(np.float32))
        numbers = numbers[np.isfinite(numbers)]
        middles = (numbers[1:].astype(np.float64) + numbers[:-1]) / 2
        overflow = 1.5 * float(numbers[-1]) - 0.5 * float(numbers[-2])
        points = np.concatenate([numbers, middles, [overflow, -overflow, -0.0]]).astype(np.float32)
        beside = [np.nextafter(points, np.float32(side)) for side in (np.inf, -np.inf)]
    return np.concatenate([points, *beside, np.float32([np.inf, -np.inf, np.nan, -np.nan])])


def test_numbers_are_written_as_astype_rounds_them(rng, dtype):
    anything = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    integers = np.concatenate([rng.integers(-(2**62), 2**62, 1000) >> shift for shift in range(0, 62, 7)])
    with np.errstate(invalid="ignore"):
        doubles = anything.astype(np.float64) * (1 + 2.0**-30)
    for source in (edges(dtype), anything, doubles, integers, np.arange(256, dtype=np.uint8), np.array([False, True])):
        with np.errstate(all="ignore"):
            expected = source.astype(dtype)
        target = np.empty(len(source), dtype)
        copied(source, target)
        assert_same_numbers(target, expected)


@pytest.mark.parametrize("other", TYPES)
def test_from_one_small_type_to_another(dtype, other):
    codes = all_codes(dtype)
    target = np.empty(len(codes), other)
    copied(codes, target)
    with np.errstate(all="ignore"):
        assert_same_numbers(target, codes.astype(np.float32).astype(other))


@numba.njit(parallel=True)
def doubled(x):
    result = np.empty_like(x)
    for i in numba.prange(x.shape[0]):
        for j in range(x.shape[1]):
            result[i, j] = x[i, j] + x[i, j]
    return result


@pytest.mark.parametrize("layout", ["C", "F", "strided", "reversed", "read-only"])
def test_arrays_of_every_layout(dtype, layout):
    x = np.arange(24, dtype=np.float32).reshape(4, 6).astype(dtype)
    x = {"F": np.asfortranarray(x), "strided": x[::2, ::3], "reversed": x[::-1, ::-1]}.get(layout, x)
    x.flags.writeable = layout != "read-only"
    result = doubled(x)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, (2 * x.astype(np.float32)).astype(dtype))


@numba.njit
def arithmetic(a, b):
    return (a + b, a - b, a * b, a / b, -a, abs(a), a // b, a % b, a**b, max(a, b), min(a, b), math.exp(a), np.sqrt(b),
            a + np.float32(0.1), float(a))  # fmt: skip


@numba.njit
def comparisons(a, b):
    return a < b, a <= b, a > b, a >= b, a == b, a != b, bool(a), not a, np.isnan(a), a < 1, a == np.float32(-1.5)


def test_arithmetic_is_that_of_float32(dtype):
    a, b = dtype.type(-1.5), dtype.type(3)
    single = arithmetic(np.float32(a), np.float32(b))
    assert arithmetic(a, b) == single
    signature = arithmetic.overloads[(numba.typeof(a), numba.typeof(b))].signature
    assert set(signature.return_type) == {numba.float32}


def test_comparisons(dtype):
    for a in (-1.5, 0.0, 3.0, math.nan):
        for b in (-1.5, 3.0, math.nan):
            expected = comparisons(np.float32(a), np.float32(b))
            assert comparisons(dtype.type(a), dtype.type(b)) == expected


@numba.njit
def sums(x, total):
    for i in range(x.size):
        total += x[i]
    return total


@numba.njit
def largest(x):
    most = x[0]
    for number in x:
        if number > most:
            most = number
    return most


def test_variables_that_hold_them(dtype):
    x = np.array([1, 2.5, -4], dtype)
    assert sums(x, 0.0) == -0.5
    assert sums(x, np.float32(0)) == -0.5
    most = largest(x)
    assert most == dtype.type(2.5)
    assert type(most) is dtype.type


TENTH = ml_dtypes.bfloat16(0.1)


@numba.njit
def made():
    zeros = np.zeros((2, 3), ml_dtypes.bfloat16)
    zeros[0] = 1.5
    zeros[1, 0] = jit.bfloat16(2) + ml_dtypes.bfloat16(1)
    zeros[1, 1] = TENTH
    return zeros


def test_arrays_and_numbers_are_made_in_compiled_code():
    expected = np.array([[1.5, 1.5, 1.5], [3, 0.1, 0]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(made(), expected)


def test_a_signature_can_name_them():
    compiled = numba.njit(numba.float32(jit.bfloat16[::1]))(lambda x: x[0])
    assert compiled(np.ones(1, ml_dtypes.bfloat16)) == 1


CACHED = """
import sys, numpy as np, ml_dtypes, numba
from numba_mla import jit

@numba.njit(cache=True)
def halved(kernels, x):
    jit.lane_group(kernels, 8, 8, 4, 4, 1.0)
    result = np.empty_like(x)
    for i in range(x.size):
        result[i] = jit.exp2(-1) * x[i]
    return result

print(halved(jit.kernels("float32"), np.ones(1, ml_dtypes.bfloat16))[0], sum(halved.stats.cache_hits.values()))
"""


def test_numba_s_own_cache_keeps_such_functions(tmp_path):
    script = tmp_path / "halved.py"
    script.write_text(CACHED)
    runs = [subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300) for _ in range(2)]
    assert [run.stdout for run in runs] == ["0.5 0\n", "0.5 1\n"], runs[0].stderr + runs[1].stderr


@numba.njit
def powers(x):
    result = np.empty_like(x)
    for i in range(x.size):
        result[i] = jit.exp2(x[i])
    return result


def test_exp2(rng):
    x = rng.uniform(-126, 127.5, 100_000).astype(np.float32)
    error = abs(powers(x) / np.exp2(x.astype(np.float64)) - 1)
    assert error.max() < 1.5 * 2.0**-23
    special = np.float32([0, -1, 127, 128, 1e30, np.inf, -127.6, -1e30, -np.inf, np.nan])
    expected = np.float32([1, 0.5, 2.0**127, np.inf, np.inf, np.inf, 0, 0, 0, np.nan])
    np.testing.assert_array_equal(powers(special), expected)
