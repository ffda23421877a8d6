"""Rows to the native element type: every code of fp8, rows of 656 bytes, many rows in a call; what they compile to."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from test_codegen import DTYPES, SAPPHIRE, at, draw_steps, function, rows_of

from numba_mla import runtime
from numba_mla.codegen import blocks, link, listing
from numba_mla.codegen.native import DS, DS_BLOCK, DS_LATENT, DS_ROTARY, DS_ROTARY_AT, DS_SCALES_AT, ROW_FORMATS
from numba_mla.isa import select
from numba_mla.quant import DS_BYTES

FP8 = ["float8_e4m3fn", "float8_e5m2"]
BF16 = ml_dtypes.bfloat16
DS_WIDTH = DS_LATENT + DS_ROTARY
TINY = 2.0**-126
RECORDS = [runtime.select_isa(name) for name in runtime.available_isas()]
LOOKING_UP = [record.name for record in RECORDS if record.look_up is not None and record.tiles is None]


@pytest.fixture
def record(vector_isa):
    return runtime.select_isa(vector_isa)


def assert_same(ours, expected):
    """The same bits, but for what NaNs carry."""
    assert ours.dtype == expected.dtype
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(ours.astype(np.float32)), nan)
    assert ours[~nan].tobytes() == expected[~nan].tobytes()


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("n", [1, 5, 16, 63, 64, 65, 80, 127, 129, 256, 300])
def test_every_code_of_fp8(record, name, n):
    """Wherever it lies in a row, at any alignment, with canaries at both ends."""
    for shift in range(0, 256, 5):
        codes = ((np.arange(n + 2) + shift) % 256).astype(np.uint8)
        out = np.full(n + 2, 7.5, DTYPES[record.native])
        function(record, f"native_{name}", 4)(at(out[1:]), at(codes[1:]), n, at(codes))
        assert_same(out[1:-1], codes[1:-1].view(DTYPES[name]).astype(out.dtype))
        assert out[0] == out[-1] == 7.5


def draw_rows(rng, name, count, n):
    """Rows of a format, as bytes, and the float32 that they mean."""
    if name == DS:
        rows = rng.integers(0, 256, (count, DS_BYTES), dtype=np.uint8)
        scales = np.exp2(rng.uniform(-20, 20, (count, DS_LATENT // DS_BLOCK))).astype(np.float32)
        rotary = rng.standard_normal((count, DS_ROTARY)).astype(BF16)
        rows[:, DS_SCALES_AT:DS_ROTARY_AT] = scales.view(np.uint8)
        rows[:, DS_ROTARY_AT:] = rotary.view(np.uint8)
        return rows, dequantised(rows)
    rows = np.ascontiguousarray(rng.standard_normal((count, n)).astype(DTYPES[name]))
    return rows.view(np.uint8).reshape(count, -1), rows.astype(np.float32)


def dequantised(rows):
    """Rows of 656 bytes as bfloat16 numbers, in float32."""
    scales = np.ascontiguousarray(rows[:, DS_SCALES_AT:DS_ROTARY_AT]).view(np.float32).repeat(DS_BLOCK, axis=1)
    latent = rows[:, :DS_LATENT].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    rotary = np.ascontiguousarray(rows[:, DS_ROTARY_AT:]).view(BF16)
    return np.concatenate([latent.astype(BF16), rotary], axis=1).astype(np.float32)


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize("n", [1, 31, 64, 100, DS_WIDTH])
def test_many_rows(record, rng, name, n):
    """Scattered rows at odd addresses, each followed by zeros, and nothing else touched."""
    if name == DS:
        n = DS_WIDTH
    count, padding, native = 7, 3, DTYPES[record.native]
    rows, values = draw_rows(rng, name, count, n)
    memory = np.zeros((count, rows.shape[1] + 3), np.uint8)
    order = rng.permutation(count)
    memory[order, 1:-2] = rows
    addresses = rows_of(memory)[order] + 1
    out = np.full((count + 1, n + padding + 2), 7.5, native)
    function(record, f"native_rows_{name}", 7)(
        at(out), out.strides[0], at(addresses), at(addresses), count, n, padding * out.itemsize
    )
    with np.errstate(invalid="ignore"):
        assert_same(out[:count, :n], values.astype(native))
    assert (out[:count, n : n + padding] == 0).all()
    assert (out[:count, n + padding :] == 7.5).all()
    assert (out[count] == 7.5).all()


def test_rows_of_656_bytes_at_the_ends_of_the_range(record):
    """Products that overflow, or are subnormal: these may be flushed to zero, as products with bfloat16 flush them."""
    rows = np.zeros((4, DS_BYTES), np.uint8)
    rows[:, :DS_LATENT] = np.arange(DS_LATENT) % 256
    scales = np.float32([[3e38, 1e37, 1, 1.17549435e-38], [2.0**-126, 2.0**-120, 2.0**-118, 1e-30]])
    rows[:, DS_SCALES_AT:DS_ROTARY_AT] = scales.repeat(2, axis=0).view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = dequantised(rows)
    addresses = rows_of(rows)
    out, wide = np.empty((4, DS_WIDTH), DTYPES[record.native]), np.empty((4, DS_WIDTH), np.float32)
    function(record, f"native_rows_{DS}", 7)(at(out), out.strides[0], at(addresses), at(addresses), 4, DS_WIDTH, 0)
    for row, target in zip(rows, wide, strict=True):
        function(record, f"widen_{DS}", 4)(at(target), at(row), DS_WIDTH, at(row))
    assert_same(wide, expected)
    flushed = (abs(expected) < TINY) & (out == 0)
    assert_same(np.where(flushed, expected, out.astype(np.float32)), expected)
    assert (record.native == "bfloat16") or not (flushed & (expected != 0)).any()


def test_rows_of_656_bytes_for_scales_of_all_sizes(record, rng):
    """All codes times scales of any exponent, among them both ends of those that make tables; signs, NaN and inf."""
    exponents = np.concatenate([np.arange(-149, 128), [-101, -100, -99, 99, 100, 101] * 4])
    scales = np.ldexp(rng.uniform(1, 2, len(exponents)), exponents).astype(np.float32)
    ends = np.float32([2.0**-100, 2.0**100])
    special = np.concatenate([ends, np.nextafter(ends, 0), -ends, [0.0, -0.0, np.inf, -np.inf, np.nan]])
    scales = rng.permutation(np.concatenate([scales, special.astype(np.float32)]))
    scales = np.concatenate([scales, np.ones(-len(scales) % 2, np.float32)]).reshape(-1, 2)
    rows = np.zeros((len(scales), DS_BYTES), np.uint8)
    # Two blocks have all codes.
    rows[:, :DS_LATENT] = np.arange(DS_LATENT) % 256
    rows[:, DS_SCALES_AT:DS_ROTARY_AT] = scales.repeat(2, axis=1).view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = dequantised(rows)
    addresses = rows_of(rows)
    out = np.empty((len(rows), DS_WIDTH), DTYPES[record.native])
    function(record, f"native_rows_{DS}", 7)(
        at(out), out.strides[0], at(addresses), at(addresses), len(rows), DS_WIDTH, 0
    )
    flushed = (abs(expected) < TINY) & (out == 0)
    assert_same(np.where(flushed, expected, out.astype(np.float32)), expected)


@pytest.mark.parametrize("name", LOOKING_UP)
def test_operations_mean_what_their_twins_say(name, rng):
    record = runtime.select_isa(name)
    codes = rng.integers(0, 256, 64, dtype=np.uint8)
    words = np.arange(128, dtype=np.uint8).view(DTYPES[FP8[0]]).astype(BF16).view(np.uint16)
    upper, lower = (record.look_up.twin(part[:64], codes, part[64:]) for part in (words >> 8, words & 255))
    meant = ((upper | (codes & 0x80)) << 8 | lower).astype(np.uint16).view(BF16)
    out = np.empty(64, BF16)
    function(record, f"native_{FP8[0]}", 4)(at(out), at(codes), 64, at(codes))
    assert_same(out, meant)
    row = np.zeros(DS_BYTES, np.uint8)
    row[:32], row[DS_SCALES_AT : DS_SCALES_AT + 4] = codes[:32], np.float32([0.37]).view(np.uint8)
    product = codes[:32].view(DTYPES[FP8[0]]).astype(np.float32) * np.float32(0.37)
    long = np.empty(DS_WIDTH, BF16)
    function(record, f"native_{DS}", 4)(at(long), at(row), DS_WIDTH, at(row))
    assert_same(long[:32], record.narrow.twin(product[:16], product[16:]))


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("k", [1, 15, 16, 33, 64])
def test_scaled_dot_block(record, rng, k, accumulate):
    """A sum from zero on, times its column's scale, added to what is there in one rounding."""
    vectors = record.blocks.weight[1]
    columns = vectors * record.vector_width
    for rows in record.weight_rows:
        a, b = draw_steps(rng, record, rows, k + 3), draw_steps(rng, record, k, columns + 5)
        scales = rng.random(columns, dtype=np.float32)
        c = rng.standard_normal((rows + 2, columns + 4), dtype=np.float32)
        expected, sums = c.copy(), np.zeros((rows, columns), np.float32)
        for step in range(k):
            sums = record.multiply_add.twin(a[:, step : step + 1].copy(), b[step : step + 1, :columns].copy(), sums)
        present = expected[1:-1, 2:-2] * np.float64(accumulate)
        expected[1:-1, 2:-2] = (sums.astype(np.float64) * scales + present).astype(np.float32)
        pointers = rows_of(a)
        function(record, blocks.scaled_name(rows, vectors), 9)(
            at(pointers), at(pointers), at(b), b.strides[0], k, at(c[1:, 2:]), c.strides[0], at(scales), accumulate
        )
        np.testing.assert_array_equal(c, expected)


def look_up_loops(machine):
    """Instructions on vectors, moves apart, of every loop that looks fp8 codes up and does nothing else with them."""
    code = link.assembly(select(machine, forced="avx512bf16"), machine.triple)
    loops = re.findall(r"^\.LBB\w+:\n((?:(?!\.LBB).*\n)*?\tj\w+\t\.LBB\w+)", code, flags=re.MULTILINE)
    looked = [loop for loop in loops if re.search(r"vperm[it]2b", loop) and "vdpbf16ps" not in loop]
    return [re.findall(r"^\tv(?!mov)\w+", loop, flags=re.MULTILINE) for loop in looked]


def test_looking_up_takes_six_instructions_for_64_codes():
    """In order, interleaved, with their sign: one row and many of both formats."""
    loops = look_up_loops(replace(SAPPHIRE, feature_string=SAPPHIRE.feature_string + ",+avx512vbmi"))
    assert [len(loop) for loop in loops] == [6] * 4
    assert not look_up_loops(SAPPHIRE)


@pytest.mark.parametrize("name", [f"native_{DS}", f"native_rows_{DS}"])
def test_scaling_multiplies_tables_and_not_codes(name):
    """Rows of 656 bytes: of each block of 128 codes 32 products, rounded once, put into tables by four permutations."""
    machine = replace(SAPPHIRE, feature_string=SAPPHIRE.feature_string + ",+avx512vbmi")
    body = listing.function_body(link.assembly(select(machine, forced="avx512bf16"), machine.triple), name)
    blocks, groups = DS_LATENT // 128, DS_LATENT // 64
    assert body.count("vcvtne2ps2bf16") == blocks
    assert len(re.findall(r"vmulps.*zmm", body)) == 2 * blocks + 2  # one vector of the other way, for unusual scales
    assert body.count("vpermb") + body.count("vpermt2b") + body.count("vpermi2b") == 4 * blocks + 2 * groups


def test_blocks_of_scaled_weights_hold_no_vector_on_the_stack():
    """Nor after their loop, where the scaled sums are added to what is there."""
    machine = replace(SAPPHIRE, feature_string=SAPPHIRE.feature_string + ",+avx512vbmi")
    record = select(machine, forced="avx512bf16")
    code = link.assembly(record, machine.triple)
    names = [blocks.scaled_name(rows, record.blocks.weight[1]) for rows in record.weight_rows]
    names += [f"dot_scaled_codes_{rows}_{element}" for rows in (4, 2, 1) for element in FP8]
    for name in names:
        body = listing.function_body(code, name)
        assert "vfmadd" in body
        assert not re.search(r"zmm.*\(%rsp\)|\(%rsp\).*zmm", body), name


def test_codes_are_looked_up_beside_the_products_without_the_stack():
    """Two look-ups of the 64 codes of two vectors, beside a product for each row and vector."""
    machine = replace(SAPPHIRE, feature_string=SAPPHIRE.feature_string + ",+avx512vbmi")
    record = select(machine, forced="avx512bf16")
    code = link.assembly(record, machine.triple)
    for element in ("float8_e4m3fn", "float8_e5m2"):
        for rows in (4, 2, 1):
            for name in (f"dot_codes_{rows}_{element}", f"dot_scaled_codes_{rows}_{element}"):
                body = listing.function_body(code, name)
                turns = body.count("vdpbf16ps") // (4 * rows)
                assert body.count("vpermt2b") + body.count("vpermi2b") == 4 * turns
                assert not listing.spills(body)
