"""fp8: cache layouts written, gathered and attended; weights with one scale and with block scales."""

import ml_dtypes
import numpy as np
import pytest

import numba_mla
from numba_mla import reference
from numba_mla.quant import DS_BYTES
from numba_mla.runtime import select_isa
from numba_mla.testing.inputs import latent_problem
from numba_mla.testing.tolerance import bmm_bounds, excess, extend_bounds

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]
FP8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
LARGEST = {FP8[0]: 448.0, FP8[1]: 57344.0}
DS = "fp8_ds_mla"


def p_rounding(problem):
    """u_P of the instruction set in force."""
    return select_isa(None, problem["q"].dtype.name).p_rounding


def empty_cache(layout, num_blocks, block_size, width):
    if layout == DS:
        return np.zeros((num_blocks, block_size, DS_BYTES), np.uint8)
    return np.zeros((num_blocks, block_size, width), layout)


def quantised_problem(rng, heads, seq_lens, new_tokens, layout, q_dtype, block_size=16, rank=512, rope=64, scale=None):
    """extend's arguments over a quantised cache of random rows."""
    problem = latent_problem(rng, heads, seq_lens, new_tokens, block_size, rank, rope, np.float32, q_dtype=q_dtype)
    rows = problem["kv_cache"].reshape(-1, rank + rope)
    cache = empty_cache(layout, *problem["kv_cache"].shape)
    numba_mla.write_cache(rows[:, :rank], rows[:, rank:], cache, np.arange(len(rows)), cache_scale=scale)
    return problem | {"kv_cache": cache} | ({} if scale is None else {"cache_scale": scale})


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize(
    ("layout", "scale"), [*((dtype, scale) for dtype in FP8 for scale in (None, 0.5, 0.037)), (DS, None)]
)
def test_stored_bytes_are_the_references(rng, layout, source, scale):
    width = (512, 64)
    x = (rng.standard_normal((40, 576)) * 10.0 ** rng.integers(-6, 4, (40, 1))).astype(source)
    x[3, :5] = [np.nan, np.inf, -np.inf, 0, -0.0]
    x[4] = 0
    x[5, :200] = np.nan
    ours, theirs = empty_cache(layout, 4, 16, 576), empty_cache(layout, 4, 16, 576)
    slots = rng.permutation(64)[:40]
    for op, cache in ((numba_mla.write_cache, ours), (reference.write_cache, theirs)):
        op(x[:, : width[0]], x[:, width[0] :], cache, slots, cache_scale=scale)
    if layout == DS:
        # NaNs may differ in their payload: compare codes and scales, and the rotary part as numbers.
        np.testing.assert_array_equal(ours[..., :528], theirs[..., :528])
        rotary = [c[..., 528:].copy().view(ml_dtypes.bfloat16).astype(np.float32) for c in (ours, theirs)]
        np.testing.assert_array_equal(*rotary)
        return
    for a, b in zip(ours.reshape(-1), theirs.reshape(-1), strict=True):
        assert a.view(np.uint8) == b.view(np.uint8) or (np.isnan(a) and np.isnan(b))


def test_saturation_and_a_scale_by_hand():
    """[1000, 465, -1000] -> [448, 448, -448]; NaN stays NaN; scale 0.5, x = 3: the byte decodes to 6.0."""
    cache = np.zeros((1, 1, 4), FP8[0])
    numba_mla.write_cache(np.float32([[1000, 465, -1000]]), np.float32([[np.nan]]), cache, [0])
    assert cache[0, 0, :3].astype(np.float32).tolist() == [448, 448, -448]
    assert np.isnan(cache[0, 0, 3].astype(np.float32))
    numba_mla.write_cache(np.full((1, 3), 3, np.float32), np.zeros((1, 1), np.float32), cache, [0], cache_scale=0.5)
    assert cache[0, 0, 0].astype(np.float32) == 6.0


@pytest.mark.parametrize("dtype", FP8)
def test_every_code_is_gathered_as_ml_dtypes_has_it(dtype):
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    for target in FLOATS:
        got, _, _ = numba_mla.gather_cache(codes.reshape(1, 1, 256), [[0]], [1], kv_lora_rank=256, dtype=target)
        with np.errstate(over="ignore"):
            expected = codes.astype(np.float32).astype(target)
        np.testing.assert_array_equal(got[0].astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", FP8)
def test_rounding_is_to_nearest_even(rng, dtype):
    """Every code, the middle between neighbours, and what lies just beside it."""
    grid = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid)])
    ties = (grid[1:] + grid[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    x = np.concatenate([grid, ties, *beside, rng.standard_normal(1000).astype(np.float32)])
    cache = np.zeros((1, 1, len(x)), dtype)
    numba_mla.write_cache(x[None], np.zeros((1, 0), np.float32), cache, [0])
    expected = np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)
    np.testing.assert_array_equal(cache[0, 0].view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", [None, *FLOATS])
@pytest.mark.parametrize(("layout", "scale"), [(FP8[0], None), (FP8[1], 0.3), (DS, None)])
def test_gather(rng, layout, scale, dtype):
    problem = quantised_problem(rng, 1, [37, 9], [1, 1], layout, np.float32, scale=scale)
    arguments = problem["kv_cache"], problem["block_table"], problem["seq_lens"]
    kv_c, k_pe, starts = numba_mla.gather_cache(*arguments, cache_scale=scale, dtype=dtype, starts=[3, 0])
    ref_c, ref_pe, ref_starts = reference.gather_cache(*arguments, cache_scale=scale, starts=[3, 0])
    assert kv_c.dtype == (dtype or ml_dtypes.bfloat16)
    np.testing.assert_array_equal(starts, ref_starts)
    unit = float(ml_dtypes.finfo(kv_c.dtype).eps) / 2 + 2.0**-24
    for ours, theirs in ((kv_c, ref_c), (k_pe, ref_pe)):
        assert excess(ours, theirs, unit * abs(theirs) + float(ml_dtypes.finfo(kv_c.dtype).smallest_subnormal)) <= 1


@pytest.mark.parametrize("q_dtype", FLOATS)
@pytest.mark.parametrize(("layout", "scale"), [(FP8[0], None), (FP8[0], 0.037), (FP8[1], 1.7), (DS, None)])
def test_extend(isa, rng, layout, scale, q_dtype):
    problem = quantised_problem(rng, 5, [300, 40, 9, 0], [7, 1, 9, 0], layout, q_dtype, scale=scale)
    out, lse = numba_mla.extend(**problem)
    assert out.dtype == q_dtype
    assert extend_bounds(**problem, p_rounding=p_rounding(problem)).excess(out, lse) <= 1


@pytest.mark.parametrize("layout", FP8)
@pytest.mark.parametrize(("rank", "rope"), [(33, 0), (7, 5), (256, 32)])
def test_extend_of_any_width(isa, rng, layout, rank, rope):
    problem = quantised_problem(rng, 3, [70, 9], [2, 9], layout, np.float32, 8, rank, rope, 0.25)
    assert extend_bounds(**problem, p_rounding=p_rounding(problem)).excess(*numba_mla.extend(**problem)) <= 1


@pytest.mark.parametrize("layout", [*FP8, DS])
def test_nan_codes_in_unseen_rows_add_nothing(isa, rng, layout):
    problem = quantised_problem(rng, 3, [40], [8], layout, np.float32)
    out, lse = numba_mla.extend(**problem)
    cache, table = problem["kv_cache"], problem["block_table"]
    nan = np.uint8(0x7F)
    cache.view(np.uint8)[table[0, 2], 8:] = nan  # past the end
    cache.view(np.uint8)[table[0, 2], 7] = nan  # position 39, seen by the last token alone
    again = numba_mla.extend(**problem)
    assert again[0][:7].tobytes() == out[:7].tobytes()
    assert again[1][:7].tobytes() == lse[:7].tobytes()
    assert np.isnan(again[0][7]).all()
    assert np.isnan(again[1][7]).all()


@pytest.mark.parametrize(("layout", "scale"), [(FP8[0], 0.5), (DS, None)])
def test_bits(isa, rng, layout, scale):
    problem = quantised_problem(rng, 3, [1100, 30], [4, 1], layout, np.float32, scale=scale)
    out, lse = numba_mla.extend(**problem)
    with numba_mla.threads(1):
        assert numba_mla.extend(**problem)[0].tobytes() == out.tobytes()
    shared = {k: v for k, v in problem.items() if k not in ("q", "query_start_loc", "seq_lens", "block_table")}
    for i in range(4):
        one = numba_mla.decode(
            problem["q"][i : i + 1], block_table=problem["block_table"][:1], seq_lens=[1097 + i], **shared
        )
        assert one[0].tobytes() == out[i : i + 1].tobytes()
        assert one[1].tobytes() == lse[i : i + 1].tobytes()


def fp8_weight(rng, shape, dtype, block):
    """A weight whose blocks have very different ranges."""
    heads, n, k = shape
    bn, bk = block
    w = rng.standard_normal(shape).astype(np.float32).astype(dtype)
    scale = (10.0 ** rng.integers(-3, 3, (heads, -(-n // bn), -(-k // bk)))).astype(np.float32)
    return w, scale


@pytest.mark.parametrize("a_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FP8)
def test_bmm_with_one_scale(isa, rng, dtype, a_dtype):
    a = rng.standard_normal((2, 5, 130)).astype(a_dtype)
    w = rng.standard_normal((2, 200, 130)).astype(np.float32).astype(dtype)
    for scale in (None, 0.037):
        expected, bound = bmm_bounds(a, w.astype(np.float32), scale=scale, out_dtype=a_dtype)
        assert excess(numba_mla.bmm(a, numba_mla.pack_weight(w), scale=scale), expected, bound) <= 1
        assert excess(numba_mla.bmm(a, numba_mla.pack_weight(w, scale=scale)), expected, bound) <= 1


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((1, 200, 130), (128, 128)),
        ((2, 576, 600), (128, 128)),
        ((1, 70, 1100), (32, 48)),
        ((3, 65, 33), (1, 33)),
        ((1, 64, 64), (500, 500)),
        ((2, 70, 100), (16, 33)),
        ((1, 66, 9), (7, 1)),
        ((1, 65, 1500), (64, 700)),
    ],
    ids=str,
)
def test_bmm_with_block_scales(isa, rng, shape, block, dtype):
    """Blocks shorter, longer and other than what is taken together; the same bits for any M and any threads."""
    w, scale = fp8_weight(rng, shape, dtype, block)
    packed = numba_mla.pack_weight(w, scale=scale, block_size=block)
    for a_dtype in FLOATS:
        a = rng.standard_normal((shape[0], 19, shape[2])).astype(a_dtype)
        expected, bound = bmm_bounds(a, reference.pack_weight(w, scale=scale, block_size=block), out_dtype=a.dtype)
        out = numba_mla.bmm(a, packed)
        assert excess(out, expected, bound) <= 1
        assert numba_mla.bmm(a[:, 2:3], packed).tobytes() == np.ascontiguousarray(out[:, 2:3]).tobytes()
        with numba_mla.threads(1):
            assert numba_mla.bmm(a, packed).tobytes() == out.tobytes()


def test_scale_rows_belong_to_their_blocks():
    """200 x 130 in blocks of 128: row 100 uses scale row 0, row 128 scale row 1; 576 rows take 5."""
    w = np.ones((1, 200, 130), FP8[0])
    scale = np.float32([[[1, 2], [4, 8]]])
    out = numba_mla.bmm(
        np.eye(130, dtype=np.float32)[None], numba_mla.pack_weight(w, scale=scale, block_size=(128, 128))
    )
    assert out[0, 0, [100, 127, 128]].tolist() == [1, 1, 4]
    assert out[0, 129, [100, 127, 128]].tolist() == [2, 2, 8]
    with pytest.raises(ValueError, match=r"scale: expected shape \(1, 5, 1\)"):
        numba_mla.pack_weight(
            np.ones((1, 576, 128), FP8[0]), scale=np.ones((1, 4, 1), np.float32), block_size=(128, 128)
        )
    with pytest.raises(ValueError, match=r"scale: expected shape \(1, 2, 5\)"):
        numba_mla.pack_weight(
            np.ones((1, 200, 600), FP8[0]), scale=np.ones((1, 5, 2), np.float32), block_size=(128, 128)
        )
    transposed = np.ones((1, 2, 5), np.float32).swapaxes(1, 2).copy().swapaxes(1, 2)
    numba_mla.pack_weight(np.ones((1, 200, 600), FP8[0]), scale=transposed, block_size=(128, 128))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 1e-45])
def test_scales_that_cannot_be(bad):
    w = np.ones((1, 4, 4), FP8[0])
    scale = np.ones((1, 2, 2), np.float32)
    scale[0, 1, 1] = bad
    with pytest.raises(ValueError, match="scale: expected finite and positive"):
        numba_mla.pack_weight(w, scale=scale, block_size=(2, 2))
    with pytest.raises(ValueError, match="weight_scale: expected finite and positive"):
        numba_mla.block_quant_to_tensor_quant(w[0], scale[0], (2, 2))


@pytest.mark.parametrize(
    ("nope", "value", "block"), [(64, 64, 128), (128, 128, 128), (128, 64, 128), (48, 80, 128), (3, 5, 4)]
)
def test_absorbed_fp8_weights_are_the_dequantised_ones_split(isa, rng, nope, value, block):
    """Blocks that straddle W_UK and W_UV, and heads, included."""
    heads, rank = 3, 200
    rows = heads * (nope + value)
    (weight,), (scale,) = fp8_weight(rng, (1, rows, rank), FP8[0], (block, 128))
    whole = reference.pack_weight(weight[None], scale=scale[None], block_size=(block, 128))[0]
    scaled = numba_mla.BlockScaled(weight, scale, (block, 128))
    w_uk, w_uv = numba_mla.absorb_weights(scaled, heads, nope, value)
    for part, defined in zip((w_uk, w_uv), reference.absorb_weights(scaled, heads, nope, value), strict=True):
        np.testing.assert_array_equal(reference.pack_weight(part), defined)
    split = whole.reshape(heads, nope + value, rank)
    for part, expected in ((w_uk, split[:, :nope].swapaxes(1, 2)), (w_uv, split[:, nope:])):
        np.testing.assert_array_equal(
            reference.pack_weight(part.weight, scale=part.scale, block_size=part.block_size), expected
        )
        a = rng.standard_normal((heads, 2, expected.shape[2])).astype(np.float32)
        ref, bound = bmm_bounds(a, expected)
        assert excess(numba_mla.bmm(a, numba_mla.pack_weight(part)), ref, bound) <= 1


@pytest.mark.parametrize(
    ("shape", "block"), [((200, 130), (128, 128)), ((576, 64), (128, 128)), ((5, 7), (2, 3))], ids=str
)
def test_requantisation_is_the_references(rng, shape, block):
    w, scale = fp8_weight(rng, (1, *shape), FP8[0], block)
    ours, d = numba_mla.block_quant_to_tensor_quant(w[0], scale[0], block)
    theirs, ref_d = reference.block_quant_to_tensor_quant(w[0], scale[0], block)
    assert ours.tobytes() == theirs.tobytes()
    assert d == ref_d
    assert d.dtype == np.float32
    by_transpose, _ = numba_mla.block_quant_to_tensor_quant(w[0], np.ascontiguousarray(scale[0].T).T, block)
    assert by_transpose.tobytes() == ours.tobytes()


def test_a_block_of_zeros_gives_zeros():
    out, scale = numba_mla.block_quant_to_tensor_quant(np.zeros((4, 4), FP8[0]), np.ones((1, 1), np.float32), (4, 4))
    assert (out.astype(np.float32) == 0).all()
    assert np.isfinite(scale)
    cache = np.zeros((1, 1, DS_BYTES), np.uint8)
    numba_mla.write_cache(np.zeros((1, 512), np.float32), np.zeros((1, 64), np.float32), cache, [0])
    kv_c, k_pe, _ = numba_mla.gather_cache(cache, [[0]], [1])
    assert (kv_c.astype(np.float32) == 0).all()
    assert (k_pe.astype(np.float32) == 0).all()


@pytest.mark.parametrize("a_dtype", [np.float32, ml_dtypes.bfloat16])
def test_block_scales_are_closer_than_one_scale(isa, rng, a_dtype):
    """The reason to keep them: blocks of very different ranges lose their small members to one scale."""
    w, scale = fp8_weight(rng, (1, 256, 256), FP8[0], (128, 128))
    exact = reference.pack_weight(w, scale=scale, block_size=(128, 128))
    a, out = rng.standard_normal((1, 4, 256)).astype(a_dtype), np.empty((1, 4, 256), np.float32)
    packed = numba_mla.pack_weight(w, scale=scale, block_size=(128, 128))
    assert packed.isa == select_isa(None, "bfloat16").name
    kept = numba_mla.bmm(a, packed, out=out.copy())
    one, d = numba_mla.block_quant_to_tensor_quant(w[0], scale[0], (128, 128))
    lost = numba_mla.bmm(a, numba_mla.pack_weight(one[None], scale=float(d)), out=out)
    # Each column by its own size, so that those of small blocks count too.
    expected = reference.bmm(a, exact)
    size = abs(expected).max(axis=1)
    error = [(abs(x - expected).max(axis=1) / size).max() for x in (kept, lost)]
    assert error[0] < error[1] / 1000


def test_misfits_are_refused():
    q, table = np.zeros((1, 2, 576), np.float32), [[0]]
    cases = [
        (np.zeros((1, 4, 576), np.uint8), {}, "kv_cache: expected rows of 656 bytes"),
        (np.zeros((1, 4, DS_BYTES), np.uint8), {"cache_scale": 1.0}, "cache_scale: expected None"),
        (np.zeros((1, 4, DS_BYTES), np.uint8), {"kv_lora_rank": 500}, "kv_lora_rank: expected 512"),
        (np.zeros((1, 4, 576), np.float32), {"cache_scale": 1.0}, "cache_scale: expected None"),
        (np.zeros((1, 4, 576), FP8[0]), {"cache_scale": 0.0}, "cache_scale: expected finite, positive"),
    ]
    for cache, options, message in cases:
        with pytest.raises(ValueError, match=message):
            numba_mla.decode(q, cache, table, [1], scale=1.0, **options)
