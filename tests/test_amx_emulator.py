"""AMX tile instructions on any machine: what they compute, against the numpy model of the manual.

On a processor with AMX these tests run on the hardware.
"""

import ctypes
import mmap
import threading
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import tile_programs
from tile_programs import (
    FULL,
    TRIPLES,
    compile_program,
    form_program,
    instructions,
    random_floats,
    random_form,
    run,
    run_in_thread,
)

from numba_mla.testing.amx import Tiles, tile_config

pytestmark = tile_programs.MARKS


@pytest.fixture
def tiles(amx_emulation):
    """The machine's tiles; released at the end."""
    yield amx_emulation
    run("tilerelease")


def assert_same_bits(got, want):
    """float32 arrays: equal bits, but for what is inside of NaNs, which must be quiet."""
    is_nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), is_nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~is_nan], want.view(np.uint32)[~is_nan])
    assert (got.view(np.uint32)[is_nan] & 0x00400000 != 0).all()


def test_every_addressing_form_moves_the_right_bytes(rng, tiles):
    forms = [random_form(rng) for _ in range(150)]
    program = form_program(forms)
    memory = rng.integers(0, 256, 8192).astype(np.uint8)
    model = Tiles()
    config = tile_config([(16, 64)] * 3 + [(7, 36)])
    for i, (_, _, scale, displacement) in enumerate(forms):
        index = int(rng.integers(-400, 400)) // scale
        place = int(rng.integers(3000, 5000))
        arguments = (memory.ctypes.data + place - displacement, index)
        model.load_config(config)
        run("ldtilecfg", config)
        model.load(3, memory, place, index * scale)
        program[f"load_{i}"](*arguments)
        stored, want = np.zeros((2, 7, 36), np.uint8)
        run("tilestored_3", stored, 36)
        model.store(3, want.reshape(-1), 0, 36)
        np.testing.assert_array_equal(stored, want, err_msg=str(forms[i]))
        # And back, elsewhere: nothing else is written.
        expected = np.roll(memory, 1)
        model.store(3, expected, place, index * scale)
        memory[:] = np.roll(memory, 1)
        program[f"store_{i}"](*arguments)
        np.testing.assert_array_equal(memory, expected, err_msg=str(forms[i]))


def test_loads_and_stores_touch_no_byte_past_the_tile(rng, tiles):
    """The last row ends where memory that must not be touched begins."""
    page = mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, 3 * page), np.uint8)
    libc = ctypes.CDLL(None)
    for guard in (0, 2 * page):
        assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + guard), page, 0) == 0  # no access
    inside = memory[page : 2 * page]
    inside[:] = rng.integers(0, 256, page)
    for rows, colsb in [(16, 64), (5, 4), (9, 60)]:
        run("ldtilecfg", tile_config([(rows, colsb)]))
        for place in (0, page - rows * colsb):
            run("tileloadd_0", inside[place:], colsb)
            before = inside.copy()
            inside[place:][: rows * colsb] = 0
            run("tilestored_0", inside[place:], colsb)
            np.testing.assert_array_equal(inside, before)


def shape_of(rng):
    """Rows, columns and depth of a product."""
    return (int(rng.integers(1, 17)) for _ in range(3))


def product_config(triple, rows, columns, depth):
    shapes = [(0, 0)] * 8
    for tile, shape in zip(triple, [(rows, 4 * columns), (rows, 4 * depth), (depth, 4 * columns)], strict=True):
        shapes[tile] = shape
    return tile_config(shapes)


def bfloat16_bits(rng, shape, kind):
    """Codes of bfloat16 of a kind: see KINDS."""
    low, high = KINDS[kind]
    values = random_floats(rng, int(np.prod(shape)), low, high).astype(ml_dtypes.bfloat16).view(np.uint16)
    if kind == "special":
        pool = np.array([0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFA0, 0x7F7F], np.uint16)
        values = np.where(rng.random(values.size) < 0.04, rng.choice(pool, values.size), values)
    return values.reshape(shape).astype(np.uint16)


# Smallest and largest exponents: products of "tiny" are about the smallest normal number, of "huge" about infinity.
KINDS = {"usual": (-8, 4), "wide": (-40, 40), "tiny": (-66, -58), "huge": (60, 65), "special": (-133, 60)}


@pytest.mark.parametrize("kind", KINDS)
def test_tdpbf16ps_is_the_models_bit_for_bit(rng, tiles, kind):
    model = Tiles()
    for step in range(40):
        triple = TRIPLES[step % len(TRIPLES)]
        target, left, right = triple
        rows, columns, depth = (16, 16, 16) if step == 0 else shape_of(rng)
        a, b = bfloat16_bits(rng, (rows, 2 * depth), kind), bfloat16_bits(rng, (depth, 2 * columns), kind)
        low, high = KINDS[kind]
        c = random_floats(rng, rows * columns, max(2 * low, -133), min(2 * high, 127)).reshape(rows, columns)
        if kind == "special":
            odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40], np.float32)
            c = np.where(rng.random(c.shape) < 0.2, rng.choice(odd, c.shape), c)
            c.view(np.uint32)[0, 0] = 0x7F800001  # a signalling NaN
        config = product_config(triple, rows, columns, depth)
        got, want = c.copy(), c.copy()
        run("ldtilecfg", config)
        model.load_config(config)
        for tile, array in zip(triple, (c, a, b), strict=True):
            row_bytes = array.shape[1] * array.itemsize
            run(f"tileloadd_{tile}", array, row_bytes)
            model.load(tile, array.view(np.uint8).reshape(-1), 0, row_bytes)
        run("tdpbf16ps_" + "_".join(map(str, triple)))
        model.dot_bf16(target, left, right)
        run(f"tilestored_{target}", got, 4 * columns)
        model.store(target, want.view(np.uint8).reshape(-1), 0, 4 * columns)
        assert_same_bits(got, want)


def test_zeros_denormals_and_infinities_by_hand(tiles):
    """Single products whose results are known without any model."""
    one, tiny, half_tiny = 0x3F80, 0x0080, 0x0040  # 1, 2^-126, a denormal
    cases = [
        # a even, a odd, b even, b odd, C, result
        (0x8000, 0x8000, one, one, -0.0, 0.0),  # sums start from +0
        (half_tiny, 0, 0x7F00, one, 0.0, 0.0),  # a denormal is zero, whatever it is multiplied by
        (0x2000, 0, 0x1F80, 0, 2.0**-125, 2.0**-125),  # a subnormal sum is lost before C is added
        (0x7F00, 0x7F00, 0x7F00, 0x7F00, -np.inf, np.nan),  # overflow to infinity, less infinity
        (tiny, tiny, one, one, 0.0, 2.0**-125),
        (one, 0, one, 0, 1e-40, 1.0),
        (0, 0, 0, 0, 1e-40, 0.0),
        (0x4B80, one, one, one, -(2.0**24), 0.0),  # 2^24 + 1 rounds to even before C takes it away
    ]
    for *words, c, want in cases:
        a, b = np.array(words[:2], np.uint16), np.array(words[2:], np.uint16)
        got = np.array([c], np.float32)
        run("ldtilecfg", product_config((0, 1, 2), 1, 1, 1))
        for tile, array in enumerate((got, a, b)):
            run(f"tileloadd_{tile}", array, 4)
        run("tdpbf16ps_0_1_2")
        run("tilestored_0", got, 4)
        assert_same_bits(got, np.array([want], np.float32))


def test_sums_that_round_up_to_a_normal_number_are_kept(tiles):
    """2^-126 - 2^-152 is 2^-126 in 24 bits; 2^-126 - 2^-150 is a 24-bit number, subnormal, so lost."""
    for exponent, want in [(-76, 2.0**-126), (-75, 0.0)]:
        a, b = np.array([[2.0**-63, 0, 2.0**exponent, 0], [2.0**-63, 0, -(2.0**exponent), 0]]).astype(
            ml_dtypes.bfloat16
        )
        got = np.zeros(1, np.float32)
        run("ldtilecfg", product_config((0, 1, 2), 1, 1, 2))
        run("tileloadd_1", a.view(np.uint16), 8)
        run("tileloadd_2", b.view(np.uint16), 4)
        run("tdpbf16ps_0_1_2")
        run("tilestored_0", got, 4)
        assert got[0] == want


def test_a_threads_own_vector_settings_neither_count_nor_change(rng, tiles):
    a, b = bfloat16_bits(rng, (16, 32), "tiny"), bfloat16_bits(rng, (16, 32), "tiny")
    config = product_config((0, 1, 2), 16, 16, 16)
    results, seen = [], np.zeros(2, np.uint32)
    usual = np.zeros(1, np.uint32)
    run("get_mxcsr", usual)
    # The usual one, and: rounding up, denormals kept, all flags clear.
    for i, settings in enumerate([usual.copy(), np.array([0x5F80], np.uint32)]):
        out = np.zeros((16, 16), np.float32)
        run("ldtilecfg", config)
        run("tileloadd_1", a, 64)
        run("tileloadd_2", b, 64)
        run("set_mxcsr", settings)
        run("tdpbf16ps_0_1_2")
        run("get_mxcsr", seen[i:])
        run("set_mxcsr", usual)
        run("tilestored_0", out, 64)
        results.append(out)
    assert seen[1] == 0x5F80
    assert (results[0] != 0).any()
    assert_same_bits(results[0], results[1])


PRODUCT = """
define void @product(ptr %a, ptr %b, ptr %c) #0 {
entry:
  call void @llvm.x86.ldtilecfg(ptr @full)
CLEAR
  br label %loop
loop:
  %step = phi i64 [ 0, %entry ], [ %next, %loop ]
  %a0 = getelementptr i8, ptr %a, i64 %step
  %a1 = getelementptr i8, ptr %a0, i64 18432
  %down = mul i64 %step, 32
  %b0 = getelementptr i8, ptr %b, i64 %down
  %b1 = getelementptr i8, ptr %b0, i64 64
  call void @llvm.x86.tileloadd64(i8 4, ptr %a0, i64 1152)
  call void @llvm.x86.tileloadd64(i8 5, ptr %a1, i64 1152)
  call void @llvm.x86.tileloadd64(i8 6, ptr %b0, i64 128)
  call void @llvm.x86.tileloaddt164(i8 7, ptr %b1, i64 128)
  call void @llvm.x86.tdpbf16ps(i8 0, i8 4, i8 6)
  call void @llvm.x86.tdpbf16ps(i8 1, i8 4, i8 7)
  call void @llvm.x86.tdpbf16ps(i8 2, i8 5, i8 6)
  call void @llvm.x86.tdpbf16ps(i8 3, i8 5, i8 7)
  %next = add i64 %step, 64
  %more = icmp ult i64 %next, 1152
  br i1 %more, label %loop, label %end
end:
  %c1 = getelementptr i8, ptr %c, i64 64
  %c2 = getelementptr i8, ptr %c, i64 2048
  %c3 = getelementptr i8, ptr %c, i64 2112
  call void @llvm.x86.tilestored64(i8 0, ptr %c, i64 128)
  call void @llvm.x86.tilestored64(i8 1, ptr %c1, i64 128)
  call void @llvm.x86.tilestored64(i8 2, ptr %c2, i64 128)
  call void @llvm.x86.tilestored64(i8 3, ptr %c3, i64 128)
  call void @llvm.x86.tilerelease()
  ret void
}
"""


@cache
def product_program():
    """32 x 32 = (32 x 576) . (288 pairs x 32): a 2 x 2 block, its configuration beside the code."""
    clear = "\n".join(f"  call void @llvm.x86.tilezero(i8 {tile})" for tile in range(4))
    content = "".join(f"\\{byte:02x}" for byte in FULL.tolist())
    constant = f'@full = internal constant [64 x i8] c"{content}"\n'
    return compile_program(constant + PRODUCT.replace("CLEAR", clear))


def test_a_whole_product_in_one_function(rng, tiles):
    a, b = bfloat16_bits(rng, (32, 576), "usual"), bfloat16_bits(rng, (288, 64), "usual")
    got = np.zeros((32, 32), np.float32)
    product_program()["product"](a.ctypes.data, b.ctypes.data, got.ctypes.data)
    model = Tiles()
    want = np.zeros((32, 32), np.float32)
    memory = {"a": a.view(np.uint8).reshape(-1), "b": b.view(np.uint8).reshape(-1)}
    for row in range(2):
        for column in range(2):
            model.load_config(FULL)
            for step in range(18):
                model.load(1, memory["a"], 16 * 1152 * row + 64 * step, 1152)
                model.load(2, memory["b"], 128 * 16 * step + 64 * column, 128)
                model.dot_bf16(0, 1, 2)
            model.store(0, want.view(np.uint8).reshape(-1), 128 * 16 * row + 64 * column, 128)
    assert_same_bits(got, want)
    # The model itself, against plain float64.
    x = a.view(ml_dtypes.bfloat16).astype(np.float64)
    y = b.view(ml_dtypes.bfloat16).astype(np.float64).reshape(288, 32, 2).transpose(0, 2, 1).reshape(576, 32)
    np.testing.assert_array_less(np.abs(got - x @ y), 576 * 2.0**-24 * (np.abs(x) @ np.abs(y)))


def test_configuration_zeroing_release_and_start_row(rng, tiles):
    model = Tiles()
    memory = rng.integers(0, 256, 4096).astype(np.uint8)

    def config_is_the_models():
        seen = np.full(64, 0xAA, np.uint8)
        run("sttilecfg", seen)
        np.testing.assert_array_equal(seen, model.store_config())

    def tile_is_the_models(tile, stride):
        seen, want = np.full((2, 1024), 0xAA, np.uint8)
        run(f"tilestored_{tile}", seen, stride)
        model.store(tile, want, 0, stride)
        np.testing.assert_array_equal(seen, want)

    run("tilerelease")
    config_is_the_models()
    shapes = [(16, 64), (3, 12), (1, 4), (0, 0), (8, 32), (2, 64), (16, 8), (1, 6)]
    for config in (tile_config(shapes, start_row=2), tile_config([(5, 20)] * 8, start_row=4), tile_config([])):
        run("ldtilecfg", config)
        model.load_config(config)
        config_is_the_models()
    for config in (tile_config(shapes, start_row=2), tile_config([(5, 20)] * 8, start_row=4)):
        run("ldtilecfg", config)
        model.load_config(config)
        # From the start row on, once; then whole.
        for _ in range(2):
            run("tileloadd_0", memory, 70)
            model.load(0, memory, 0, 70)
            config_is_the_models()
            tile_is_the_models(0, 64)
        run("tilezero_0")
        model.zero(0)
        tile_is_the_models(0, 64)
    run("tileloaddt1_1", memory, 48)
    model.load(1, memory, 0, 48)
    tile_is_the_models(1, 20)
    # The same configuration again zeroes the tiles; palette 0 leaves none.
    config = tile_config([(5, 20)] * 8)
    run("ldtilecfg", config)
    model.load_config(config)
    tile_is_the_models(1, 20)
    palette_0 = tile_config([(99, 99)], palette=0)
    run("ldtilecfg", palette_0)
    model.load_config(palette_0)
    config_is_the_models()


def test_each_thread_has_its_own_tiles(rng, tiles):
    """Eight threads, each with a shape of its own that changes, take turns at random."""
    seeds = rng.integers(0, 2**31, 8)
    start, errors = threading.Barrier(8), []

    def work(seed):
        try:
            own, model = np.random.default_rng(seed), Tiles()
            start.wait()
            for _ in range(15):
                triple = TRIPLES[own.integers(len(TRIPLES))]
                rows, columns, depth = shape_of(own)
                config = product_config(triple, rows, columns, depth)
                arrays = [own.standard_normal((rows, columns)).astype(np.float32)]
                arrays += [bfloat16_bits(own, shape, "usual") for shape in ((rows, 2 * depth), (depth, 2 * columns))]
                run("ldtilecfg", config)
                model.load_config(config)
                for tile, array in zip(triple, arrays, strict=True):
                    run(f"tileloadd_{tile}", array, array.strides[0])
                    model.load(tile, array.view(np.uint8).reshape(-1), 0, array.strides[0])
                run("tdpbf16ps_" + "_".join(map(str, triple)))
                model.dot_bf16(*triple)
                got, want = np.zeros((2, rows, columns), np.float32)
                run(f"tilestored_{triple[0]}", got, 4 * columns)
                model.store(triple[0], want.view(np.uint8).reshape(-1), 0, 4 * columns)
                assert_same_bits(got, want)
            run("tilerelease")
        except Exception as error:
            errors.append(error)

    instructions()
    workers = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []


def test_more_threads_than_the_table_holds_one_after_another(tiles):
    """Threads that end without releasing their tiles give their places up."""
    for _ in range(1200):
        run_in_thread("ldtilecfg", "tilezero_7")
