"""The generated functions, one by one, against their numpy twins; the generated text and its assembly."""

import ctypes
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from numba_mla import runtime
from numba_mla.codegen import blocks, link, listing, module, softmax
from numba_mla.codegen.vector import FLOATS, FORMATS, exp2_twin
from numba_mla.isa import avx512f, host, select

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def function(record, name, num_pointers_and_ints, *floats, returns=None):
    """A generated function of a record, callable with addresses, integers, then floats."""
    addresses = link.link(record, runtime.host().triple)
    kinds = [ctypes.c_int64] * num_pointers_and_ints + [ctypes.c_float] * len(floats)
    return ctypes.CFUNCTYPE(returns, *kinds)(addresses[name])


def draw_steps(rng, record, rows, steps):
    """Rows of dot steps: float32, or pairs of native elements in the bits of one."""
    if record.k_pack == 1:
        return rng.standard_normal((rows, steps), dtype=np.float32)
    native = rng.standard_normal((rows, steps * record.k_pack), dtype=np.float32).astype(DTYPES[record.native])
    return native.view(np.float32)


def join_keys(record, rows):
    """Native value rows, (keys, columns), to steps of k_pack keys: (steps, columns) in the bits of float32."""
    if record.k_pack == 1:
        return rows
    pairs = rows.reshape(-1, record.k_pack, rows.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(pairs).view(np.float32)[..., 0]


def at(array):
    return array.ctypes.data


def rows_of(matrix):
    """Addresses of a matrix' rows."""
    return np.array([at(matrix) + i * matrix.strides[0] for i in range(len(matrix))], np.int64)


@pytest.fixture
def record(vector_isa):
    return runtime.select_isa(vector_isa)


def sizes(record):
    return record.vector_width, module.weight_shapes(record), module.value_shapes(record)


@pytest.mark.parametrize("k", [1, 3, 15, 16, 17, 33, 288])
@pytest.mark.parametrize("accumulate", [0, 1])
def test_dot_block(record, rng, k, accumulate):
    """Every shape, with k tails, strides wider than the block, canaries around C, sums in the order of k."""
    width, dots, _ = sizes(record)
    for rows, vectors in dots:
        columns = vectors * width
        a, b = draw_steps(rng, record, rows, k + 3), draw_steps(rng, record, k, columns + 5)
        c = rng.standard_normal((rows + 2, columns + 4), dtype=np.float32)
        expected = c.copy()
        sums = expected[1:-1, 2:-2] if accumulate else np.zeros((rows, columns), np.float32)
        for step in range(k):
            sums = record.multiply_add.twin(a[:, step : step + 1].copy(), b[step : step + 1, :columns].copy(), sums)
        expected[1:-1, 2:-2] = sums
        pointers = rows_of(a)
        function(record, blocks.dot_name(rows, vectors), 10)(
            at(pointers), at(pointers), at(b), b.strides[0], k, at(c[1:, 2:]), c.strides[0], accumulate, at(b), 24
        )
        np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("accumulate", [0, 1])
def test_value_block(record, rng, accumulate):
    width, _, values = sizes(record)
    rest = record.k_pack * (3 if record.tiles is None else record.granule)
    keys = 2 * record.tiling.value_unroll + rest
    for lanes, vectors in values:
        columns = vectors * width
        v = rng.standard_normal((keys, columns + 9), dtype=np.float32).astype(DTYPES[record.native])
        p = draw_steps(rng, record, keys // record.k_pack, lanes + 3)
        alpha = rng.random(lanes, dtype=np.float32)
        o = rng.standard_normal((lanes + 2, columns + 4), dtype=np.float32)
        expected = o.copy()
        sums = expected[1:-1, 2:-2] * alpha[:, None] if accumulate else np.zeros((lanes, columns), np.float32)
        joined = join_keys(record, v[:, 5 : 5 + columns])
        for step in range(keys // record.k_pack):
            weight = p[step, :lanes].copy()[:, None]
            sums = record.multiply_add.twin(weight, joined[step : step + 1].copy(), sums)
        expected[1:-1, 2:-2] = sums
        pointers = rows_of(v)
        if accumulate:
            o[1:-1, 2:-2] = step_order(record, o[1:-1, 2:-2].copy())
        function(record, blocks.value_name(lanes, vectors), 10)(
            at(pointers), 0, 5 * v.itemsize, keys, at(p), p.strides[0], at(o[1:, 2:]), o.strides[0], at(alpha),
            accumulate,
        )  # fmt: skip
        expected[1:-1, 2:-2] = step_order(record, sums)
        np.testing.assert_array_equal(o, expected)


def step_order(record, columns):
    """Columns as unpacking the low and the high halves of each 128 bits of two rows brings them."""
    if not record.has_step_order:
        return columns
    parts = columns.reshape(len(columns), -1, record.vector_width // 4, 2, 4)
    return parts.transpose(0, 1, 3, 2, 4).reshape(columns.shape)


def full(keys):
    """The same limit for every vector of lanes."""
    return np.full(64, keys)


@pytest.mark.parametrize("keys", [1, 7, 256])
def test_softmax_over_a_tile(record, rng, keys):
    lanes, padded = 2 * record.vector_width, -(-keys // 8) * 8
    scores = (4 * rng.standard_normal((padded + 1, lanes))).astype(np.float32)
    scores[0, 3] = np.nan
    scores[: keys // 2, 5] = softmax.MASKED
    scores[:, 6] = softmax.MASKED
    m = rng.standard_normal(lanes).astype(np.float32)
    m[6:9] = softmax.NO_MAXIMUM
    length, alpha = rng.random(lanes, dtype=np.float32), np.empty(lanes, np.float32)
    c = np.float32(0.3)
    work, new_m, new_l = scores.copy(), m.copy(), length.copy()
    # The second vector of lanes takes all keys, the first one fewer: the rest may hold anything, and counts as masked.
    limits = np.array([keys - keys // 4, keys])
    function(record, "softmax", 8, c)(
        at(work), work.strides[0], at(limits), padded, lanes, at(new_m), at(new_l), at(alpha), c
    )
    scores[limits[0] : keys, : record.vector_width] = softmax.MASKED
    maximum = np.fmax(m, np.fmax.reduce(scores[:keys], axis=0))
    p = exp2_twin((scores[:keys] - maximum) * c)
    np.testing.assert_array_equal(new_m, maximum)
    found, unit = probabilities(record, work, padded)
    np.testing.assert_allclose(found[:keys], p, rtol=2**-20 + unit)
    assert (found[keys:padded] == 0).all()
    np.testing.assert_array_equal(work[padded:], scores[padded:])
    np.testing.assert_allclose(alpha, exp2_twin((m - maximum) * c), rtol=2**-20)
    np.testing.assert_allclose(new_l, length * alpha + p.sum(axis=0, dtype=np.float64), rtol=2**-16)
    assert np.isnan(found[0, 3])
    assert (found[:keys, 6] == 0).all()
    assert alpha[6] == 1  # nothing seen, nothing changed
    assert new_l[6] == length[6]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("soonest", [-(2**31), 0, 297, 300, 304, 309, 2**31 - 1])
@pytest.mark.parametrize("latest", [0, 300, 304, 320])
def test_mask(record, rng, soonest, latest, causal):
    """Lanes that see none, some and all of the keys, from any position on; the columns beside them are left alone."""
    keys, lanes, first = 9, 2 * record.vector_width, 300
    scores = rng.standard_normal((keys + 1, lanes + 3), dtype=np.float32)
    low = rng.integers(0, latest + 1, lanes).astype(np.int32)
    high = rng.integers(soonest, 2**31, lanes).astype(np.int32)
    if causal:
        high = np.sort(rng.integers(first - 3, first + keys + 3, lanes)).astype(np.int32)
    low[1], high[2] = latest, soonest
    position = first + np.arange(keys)[:, None]
    expected = scores.copy()
    expected[:keys, :lanes][(position < low) | (position >= high)] = softmax.MASKED
    function(record, "mask", 7)(at(scores), scores.strides[0], at(full(keys)), lanes, first, at(low), at(high))
    np.testing.assert_array_equal(scores, expected)


def test_a_first_tile_that_is_wholly_masked_counts_for_nothing(record, rng):
    """As with a window: the state after it and the first seen tile is that of the seen tile alone."""
    keys, lanes, c = 8, record.vector_width, np.float32(0.3)
    tiles = rng.standard_normal((3, keys, lanes), dtype=np.float32)
    tiles[0] = softmax.MASKED
    tiles[1, :5] = softmax.MASKED  # masked at its start
    tiles[2, 2:5] = softmax.MASKED  # in its middle, and
    tiles[2, 7] = softmax.MASKED  # at its end

    def state_after(tiles):
        m, length, alpha = np.full(lanes, softmax.NO_MAXIMUM, np.float32), np.zeros(lanes, np.float32), np.ones(lanes)
        alpha = alpha.astype(np.float32)
        for scores in tiles.copy():
            function(record, "softmax", 8, c)(
                at(scores), scores.strides[0], at(full(keys)), keys, lanes, at(m), at(length), at(alpha), c
            )
        return m, length

    m, length = state_after(tiles[:1])
    assert (m == softmax.NO_MAXIMUM).all()
    assert (length == 0).all()
    for with_it, without in zip(state_after(tiles), state_after(tiles[1:]), strict=True):
        np.testing.assert_array_equal(with_it, without)
    seen = np.where(np.isinf(tiles[1:]), -np.inf, tiles[1:]).reshape(-1, lanes)
    m, length = state_after(tiles)
    np.testing.assert_array_equal(m, seen.max(axis=0))
    np.testing.assert_allclose(length, np.exp2((seen - m) * np.float64(c)).sum(axis=0), rtol=2**-18)


def probabilities(record, work, padded):
    """What the softmax left of a tile, (keys, lanes), and the unit roundoff that it was rounded to."""
    if record.k_pack == 1:
        return work[:padded], 0.0
    pairs = work[: padded // 2].view(DTYPES[record.native]).astype(np.float32)
    return pairs.reshape(padded // 2, -1, 2).swapaxes(1, 2).reshape(padded, -1), 2.0**-8


def test_exp2_is_accurate_exact_at_zero_and_zero_at_the_bottom(record, rng):
    """Through the softmax of one key against a maximum of 0."""
    lanes = record.vector_width
    x = np.concatenate([-rng.random(40 * lanes) * 126, [0.0, -1.0, -126.0, -127.0, -200.0, -1e30, -np.inf]])
    x = np.resize(x, -(-len(x) // lanes) * lanes).astype(np.float32)
    out = np.empty_like(x)
    for first in range(0, len(x), lanes):
        scores = np.zeros((4, lanes), np.float32)
        scores[0] = x[first : first + lanes]
        m, length, alpha = (
            np.zeros(lanes, np.float32),
            np.zeros(lanes, np.float32),
            np.zeros(lanes, np.float32),
        )
        function(record, "softmax", 8, 1.0)(
            at(scores), scores.strides[0], at(full(1)), 4, lanes, at(m), at(length), at(alpha), 1.0
        )
        out[first : first + lanes] = length  # the sum of one key, before any rounding
    exact = np.exp2(x.astype(np.float64))
    normal = x >= -126
    assert (abs(out[normal] / exact[normal] - 1) < 2**-22).all()
    assert (out[x == 0] == 1).all()
    assert (out[x <= -127] == 0).all()


@pytest.mark.parametrize("n", [1, 5, 16, 31, 100])
def test_rows_of_every_format(record, rng, n):
    """Widening and narrowing, exact, with canaries at both ends."""
    width = record.vector_width
    for element in FLOATS:
        dtype = DTYPES[element.name]
        rows = rng.standard_normal((width, n + 2), dtype=np.float32).astype(dtype)
        wide = np.full(n + 2, 7.5, np.float32)
        function(record, f"widen_{element.name}", 4)(at(wide[1:]), at(rows[0, 1:]), n, at(rows))
        np.testing.assert_array_equal(wide[1:-1], rows[0, 1:-1].astype(np.float32))
        narrow = np.full(n + 2, 7.5, dtype)
        function(record, f"narrow_{element.name}", 3)(at(narrow[1:]), at(wide[1:]), n)
        np.testing.assert_array_equal(narrow[1:-1], rows[0, 1:-1])
        for edges in (wide[[0, -1]], narrow[[0, -1]]):
            assert (edges == np.asarray(7.5, edges.dtype)).all()


@pytest.mark.parametrize("n", [1, 2, 5, 16, 31, 33, 100])
def test_packing_queries(record, rng, n):
    """Rows to [step][lane], a last odd element joined by zero, with canaries beside the lanes."""
    width = record.vector_width
    for name in record.dtypes:
        rows = rng.standard_normal((width, n + 2), dtype=np.float32).astype(DTYPES[name])
        steps = -(-n // record.k_pack)
        packed = np.full((steps, width + 2), 7.5, np.float32)
        pointers = rows_of(rows[:, 1:])
        function(record, f"pack_{name}", 4)(at(packed[:, 1:]), packed.strides[0], at(pointers), n)
        if record.k_pack == 1:
            expected = rows[:, 1:-1].astype(np.float32)
        else:
            filled = np.zeros((width, 2 * steps), DTYPES[record.native])
            filled[:, :n] = rows[:, 1:-1]
            expected = filled.view(np.float32)
        assert packed[:, 1:-1].tobytes() == np.ascontiguousarray(expected.T).tobytes()
        assert (packed[:, [0, -1]] == 7.5).all()


@pytest.mark.parametrize("n", [1, 5, 16, 31, 100])
def test_rows_to_the_native_type(record, rng, n):
    """Exact where the native type holds the values, with canaries at both ends."""
    for element in FORMATS:
        if record.k_pack > 1 and element.num_bytes > 1 and element.name != record.native:
            continue
        row = rng.standard_normal(n + 2, dtype=np.float32).astype(DTYPES[element.name])
        out = np.full(n + 2, 7.5, DTYPES[record.native])
        function(record, f"native_{element.name}", 4)(at(out[1:]), at(row[1:]), n, at(row))
        np.testing.assert_array_equal(out[1:-1].astype(np.float32), row[1:-1].astype(np.float32))
        assert out[0].astype(np.float32) == out[-1].astype(np.float32) == 7.5


def test_clear_and_copy(record, rng):
    row = rng.integers(1, 255, 100, dtype=np.uint8)
    target = np.full(102, 7, np.uint8)
    function(record, "copy", 3)(at(target[1:]), at(row), 100)
    np.testing.assert_array_equal(target, np.concatenate([[7], row, [7]]))
    function(record, "clear", 2)(at(target[1:]), 100)
    assert target.nonzero()[0].tolist() == [0, 101]


def test_pairs_of_rows_to_float32(record, rng):
    width = record.vector_width
    for element in FORMATS:
        pairs = rng.standard_normal((3, 2 * width, 2), dtype=np.float32).astype(DTYPES[element.name])
        out = np.empty((6, 2 * width), np.float32)
        function(record, f"widen_pairs_{element.name}", 4)(at(out), at(pairs), 3, 2 * width)
        np.testing.assert_array_equal(out, pairs.swapaxes(1, 2).reshape(6, -1).astype(np.float32))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_codes_widen_and_come_back(record, name):
    codes = np.arange(2**16, dtype=np.uint16)
    values = codes.view(DTYPES[name])
    wide, back = np.empty(2**16, np.float32), np.empty(2**16, np.uint16)
    function(record, f"widen_{name}", 4)(at(wide), at(values), 2**16, at(values))
    np.testing.assert_array_equal(wide, values.astype(np.float32))
    assert (np.signbit(wide) == (codes >> 15 == 1))[~np.isnan(wide)].all()
    function(record, f"narrow_{name}", 3)(at(back), at(wide), 2**16)
    nan = np.isnan(wide)
    np.testing.assert_array_equal(back[~nan], codes[~nan])
    assert np.isnan(back.view(DTYPES[name])[nan].astype(np.float32)).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrowing_rounds_to_nearest_even(record, rng, name):
    """Every magnitude, ties, neighbours of ties, the edge of overflow, subnormals."""
    dtype = DTYPES[name]
    grid = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid)])
    ties = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    above, below = (np.nextafter(ties, np.float32(side)) for side in (np.inf, -np.inf))
    edges = np.float32([65504, 65519, 65520, 65536, 3.4e38, np.inf, -np.inf, 2**-25, 2**-24, -0.0])
    x = np.concatenate([ties, above, below, bits, edges])
    out = np.empty(len(x), dtype)
    function(record, f"narrow_{name}", 3)(at(out), at(x), len(x))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(dtype)
    nan = np.isnan(x)
    np.testing.assert_array_equal(out.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(out[nan].astype(np.float32)).all()


def test_any_nonfinite(record, rng):
    probe = function(record, "any_nonfinite", 3, returns=ctypes.c_int64)
    native = DTYPES[record.native]
    for n in (1, 15, 16, 40):
        rows = rng.standard_normal((5, n + 1), dtype=np.float32).astype(native)
        rows[:, n] = np.nan  # past the end
        pointers = rows_of(rows)
        assert probe(at(pointers), 5, n) == 0
        for bad in (np.nan, np.inf, -np.inf):
            for row, column in ((0, 0), (4, n - 1), (2, n // 2)):
                touched = rows.copy()
                touched[row, column] = bad
                pointers_touched = rows_of(touched)
                assert probe(at(pointers_touched), 5, n) == 1
                assert probe(at(pointers_touched), row, n) == 0


@pytest.mark.parametrize("n", [1, 16, 31, 32, 33, 100])
def test_finishing_a_row(record, rng, n):
    """Columns in order, scaled, rounded to every format, -0 turned to +0, with canaries at both ends."""
    columns = -(-n // record.column_step) * record.column_step
    row = rng.standard_normal((1, columns)).astype(np.float32)
    row[0, 0] = -0.0
    for element in FLOATS:
        out = np.full(n + 2, 7.5, DTYPES[element.name])
        work = np.ascontiguousarray(step_order(record, row))
        function(record, f"finish_{element.name}", 3, 0.25)(at(out[1:]), at(work), n, 0.25)
        np.testing.assert_array_equal(out[1:-1], (row[0, :n] * np.float32(0.25)).astype(out.dtype))
        assert not np.signbit(out[1].astype(np.float32))
        assert out[0].astype(np.float32) == out[-1].astype(np.float32) == 7.5


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 300])
def test_listing_rows(record, count):
    for stride in (1152, 0, -64):
        rows = np.full(count + 1, 5, np.int64)
        function(record, "list_rows", 4)(at(rows), 1 << 40, stride, count)
        assert rows.tolist() == [(1 << 40) + stride * i for i in range(count)] + [5]


def fake_host(cpu, features, triple="x86_64-unknown-linux-gnu"):
    return host.Host(triple, cpu, features)


PLAIN = fake_host("x86-64", "")
AVX2 = fake_host("haswell", "+avx,+avx2,+fma,+f16c")
AVX512 = fake_host("skylake-avx512", "+avx,+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq")
ARM = fake_host("neoverse-n1", "+neon", "aarch64-unknown-linux-gnu")


@pytest.mark.parametrize(
    ("machine", "present", "absent"),
    [
        (PLAIN, r"mulps\s", r"%[yz]mm|vfmadd|tmm"),
        (AVX2, r"vfmadd\w+ps\s.*%ymm", r"%zmm|tmm"),
        (AVX512, r"vfmadd\w+ps\s.*%zmm", r"tmm"),
        (ARM, r"fmla\s", r"%"),
    ],
    ids=["x86-64", "haswell", "skylake-avx512", "aarch64"],
)
def test_generic_assembly_for_other_machines(machine, present, absent):
    """Portable vectors become each machine's own, and nothing that it does not have."""
    code = link.assembly(select(machine, forced="generic"), machine.triple)
    assert re.search(present, code)
    assert not re.search(absent, code)


SAPPHIRE = fake_host("sapphirerapids", ",".join(f"+{name}" for name in (*avx512f.NEEDED, "avx", "avx512bf16")))
NO_DOTS = fake_host("skylake-avx512", ",".join(f"+{name}" for name in (*avx512f.NEEDED, "avx")))
RECORDS = [
    *((machine, "generic") for machine in (PLAIN, AVX2, AVX512)),
    (SAPPHIRE, "avx2"),
    (SAPPHIRE, "avx512f"),
    (SAPPHIRE, "avx512bf16"),
]


@pytest.mark.parametrize(("machine", "name"), RECORDS, ids=lambda x: x if isinstance(x, str) else x.cpu)
def test_no_vector_spills_in_the_inner_loops(machine, name):
    record = select(machine, forced=name)
    code = link.assembly(record, machine.triple)
    dots, values = module.weight_shapes(record), module.value_shapes(record)
    names = [blocks.dot_name(*shape) for shape in dots] + [blocks.value_name(*shape) for shape in values]
    for symbol in ["score", *names]:
        body = listing.function_body(code, symbol)
        assert not listing.spills(body), symbol
        loop = listing.instructions(listing.inner_loop(body))
        if name != "generic":
            dot = "vdpbf16ps" if name == "avx512bf16" else "vfmadd"
            register = "%ymm" if name == "avx2" else "%zmm"
            assert any(dot in line and register in line for line in loop), symbol


def test_avx2_has_no_wider_registers():
    code = link.assembly(select(SAPPHIRE, forced="avx2"), SAPPHIRE.triple)
    assert "%zmm" not in code
    assert not re.search(r"%[xy]mm(1[6-9]|2\d|3[01])", code)


def test_text_is_stable():
    """The same record gives the same text, so that a compiled copy is found again."""
    module.build_modules.cache_clear()
    first = module.build_modules(select(AVX2), AVX2.triple)
    module.build_modules.cache_clear()
    assert module.build_modules(select(AVX2), AVX2.triple) == first


@pytest.mark.parametrize("machine", [AVX2, NO_DOTS, SAPPHIRE], ids=lambda host: host.cpu)
def test_tiles_beside_vectors_of_any_level(machine):
    """What a machine runs under emulation: no instruction that it lacks, no call of a library that is not there."""
    record = select(replace(machine, tiles=True), forced="amx_bf16")
    code = link.assembly(record, machine.triple)
    assert "tdpbf16ps" in code
    assert not re.findall(r"__\w+bf\w*", code)
    if machine is AVX2:
        assert "%zmm" not in code
    if machine is not SAPPHIRE:
        assert "vcvtne" not in code
