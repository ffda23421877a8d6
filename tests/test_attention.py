"""decode and extend against the float64 reference on the same bits, within the one tolerance."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numba_mla
from numba_mla.runtime import select_isa, workspace
from numba_mla.testing.inputs import decode_problem, latent_problem
from numba_mla.testing.tolerance import decode_bounds, extend_bounds

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
EXTEND_ONLY = ("query_start_loc", "causal")


def p_rounding(problem):
    """u_P of the instruction set in force for a problem's element type."""
    return select_isa(None, problem["q"].dtype.name).p_rounding


def assert_extends(problem, **options):
    """Run extend and hold it to the reference; return what it gave."""
    out, lse = numba_mla.extend(**problem, **options)
    target = options.get("out")
    bounds = extend_bounds(
        **problem,
        **{k: v for k, v in options.items() if k == "causal"},
        out_dtype=None if target is None else target.dtype,
        p_rounding=p_rounding(problem),
    )
    assert bounds.excess(out, lse) <= 1
    return out, lse


def assert_decodes(problem, **options):
    out, lse = numba_mla.decode(**problem, **options)
    assert decode_bounds(**problem, p_rounding=p_rounding(problem)).excess(out, lse) <= 1
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [1, 3, 5, 8, 9, 12, 16, 17, 63, 64, 126, 128])
def test_decode_any_head_count(isa, rng, num_heads, dtype):
    """Each head equals its own H = 1 run."""
    problem = decode_problem(rng, num_heads, [300, 1, 37], 16, dtype=dtype)
    out, _ = assert_decodes(problem)
    for head in (0, num_heads // 2, num_heads - 1):
        alone = problem | {"q": problem["q"][:, head : head + 1]}
        np.testing.assert_array_equal(numba_mla.decode(**alone)[0][:, 0], out[:, head])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 32), (33, 0), (7, 5), (1, 1), (48, 3), (130, 64), (64, 0)])
def test_any_width(isa, rng, rank, rope, dtype):
    assert_decodes(decode_problem(rng, 3, [65, 9], 8, rank, rope, dtype))
    assert_extends(latent_problem(rng, 3, [65, 9], [5, 9], 8, rank, rope, dtype))


@pytest.mark.parametrize("seq_len", [1, 31, 32, 33, 63, 65, 255, 256, 257, 1023, 1024, 1025, 2500, 5000])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_extend_by_three_at_every_boundary(isa, rng, seq_len, dtype):
    assert_extends(latent_problem(rng, 2, [seq_len], [min(3, seq_len)], 16, 64, 16, dtype))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_batch(isa, rng, dtype, causal):
    """Decodes, extends, speculative tokens, an idle request and a fresh prompt, in any order."""
    problem = latent_problem(rng, 6, [700, 40, 1300, 0, 90, 65], [1, 40, 4, 0, 0, 7], 16, 128, 32, dtype)
    assert_extends(problem, causal=causal)


def test_long_extend_over_many_lane_groups(isa, rng):
    assert_extends(latent_problem(rng, 5, [400, 1100], [150, 61], 32, 64, 16))


def test_queries_equal_to_zero_weigh_all_keys_alike(isa, rng):
    """q = 0 and 8 keys: lse = ln 8."""
    problem = decode_problem(rng, 4, [8], 4)
    problem["q"][:] = 0
    _, lse = numba_mla.decode(**problem)
    np.testing.assert_allclose(lse, np.log(8), rtol=0, atol=2**-21)


def test_nan_in_a_query_is_a_nan_row_and_no_other(isa, rng):
    problem = decode_problem(rng, 4, [70, 70], 16)
    problem["q"][1, 2, 5] = np.nan
    out, lse = numba_mla.decode(**problem)
    assert np.isnan(out[1, 2]).all()
    assert np.isnan(lse[1, 2])
    assert np.isfinite(np.delete(out.reshape(8, -1), 6, axis=0)).all()


@pytest.mark.parametrize("seq_lens", [[5, 0, 7], [0], [0, 0, 0], []])
def test_requests_without_keys(isa, rng, seq_lens):
    """Outputs that held NaN before: zeros and -inf for the requests without keys."""
    problem = decode_problem(rng, 3, seq_lens, 4)
    shape = (len(seq_lens), 3)
    out, lse = np.full((*shape, 512), np.nan, np.float32), np.full(shape, np.nan, np.float32)
    returned = numba_mla.decode(**problem, out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    assert decode_bounds(**problem, p_rounding=p_rounding(problem)).excess(out, lse) <= 1
    for request, seq_len in enumerate(seq_lens):
        if seq_len == 0:
            assert (out[request] == 0).all()
            assert (lse[request] == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scratch_memory_full_of_nan_changes_nothing(isa, rng, dtype):
    """Odd widths, part-filled tiles and splits, empty requests: all that is padded or carried between tiles."""
    problem = latent_problem(rng, 5, [1300, 0, 37], [3, 0, 2], 16, 37, 6, dtype)
    a, w = rng.standard_normal((2, 5, 33)).astype(dtype), rng.standard_normal((2, 19, 33)).astype(dtype)
    packed = numba_mla.pack_weight(w)

    def answers():
        return [x.tobytes() for x in (*numba_mla.extend(**problem), numba_mla.bmm(a, packed))]

    expected = answers()
    for byte in (0xFF, 0x7F):  # NaN, and large numbers
        workspace.kept.array[:] = byte
        assert answers() == expected


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unused_rows_pages_and_entries_add_nothing(isa, dtype, poison):
    """Slots past seq_len, unused blocks and unused table entries (2147480000) change no bit."""

    def problem(poison):
        rng = np.random.default_rng(7)
        return latent_problem(rng, 3, [37, 300, 5], [4, 9, 5], 16, 64, 16, dtype, poison=poison)

    clean, poisoned = numba_mla.extend(**problem(None)), numba_mla.extend(**problem(poison))
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seq_len", [3, 37, 259])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_s_first_page_is_no_padding(isa, dtype, seq_len):
    """What fills up a tile after the last key is no row of the cache, whose page 0 holds NaN here."""

    def problem(content):
        rng = np.random.default_rng(7)
        problem = latent_problem(rng, 3, [seq_len], [1], 16, 64, 16, dtype)
        cache = problem["kv_cache"]
        return problem | {
            "kv_cache": np.concatenate([np.full_like(cache[:1], content), cache]),
            "block_table": problem["block_table"] + 1,
        }

    clean, poisoned = numba_mla.extend(**problem(0)), numba_mla.extend(**problem(np.nan))
    for a, b in zip(clean, poisoned, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_heads", [1, 3, 16, 17, 128])
@pytest.mark.parametrize("prefix", [0, 3, 250])
@pytest.mark.parametrize("dtype", DTYPES)
def test_last_row_not_finite_reaches_only_its_own_lanes(isa, rng, num_heads, prefix, bad, dtype):
    """In an extend by 8 tokens only the last one sees the last row; the others' bits must not change."""
    problem = latent_problem(rng, num_heads, [prefix + 8], [8], 16, 64, 16, dtype)
    clean, clean_lse = numba_mla.extend(**problem)
    row = prefix + 7
    problem["kv_cache"][problem["block_table"][0, row // 16], row % 16] = bad
    out, lse = numba_mla.extend(**problem)
    np.testing.assert_array_equal(out[:7], clean[:7])
    np.testing.assert_array_equal(lse[:7], clean_lse[:7])
    if np.isnan(bad):
        assert np.isnan(out[7]).all()
        assert np.isnan(lse[7]).all()


def test_nan_in_the_middle_reaches_all_that_see_it(isa, rng):
    problem = latent_problem(rng, 2, [40], [30], 8, 64, 16)
    problem["kv_cache"][problem["block_table"][0, 2], 4] = np.nan  # position 20, seen from token 10 on
    assert_extends(problem)


def test_pair_of_queries_is_the_joined_array(isa, rng):
    problem = latent_problem(rng, 3, [50], [6], 16, 64, 16)
    q = problem.pop("q")
    whole = numba_mla.extend(q, **problem)
    pair = numba_mla.extend((q[..., :64].copy(), q[..., 64:].copy()), **problem)
    np.testing.assert_array_equal(whole[0], pair[0])
    np.testing.assert_array_equal(whole[1], pair[1])


def test_no_table_means_page_b_is_request_b(isa, rng):
    cache = rng.standard_normal((3, 20, 48), dtype=np.float32)
    q = rng.standard_normal((3, 4, 48), dtype=np.float32)
    arguments = {"seq_lens": [20, 3, 11], "scale": 0.2, "kv_lora_rank": 40}
    implicit = numba_mla.decode(q, cache, None, **arguments)
    explicit = numba_mla.decode(q, cache, [[0], [1], [2]], **arguments)
    np.testing.assert_array_equal(implicit[0], explicit[0])


def test_layouts_of_callers_arrays_change_nothing(isa, rng):
    """Slices of wider buffers, transposed and reversed views, odd strides, read-only arrays."""
    problem = latent_problem(rng, 3, [50, 20], [6, 2], 16, 64, 16)
    expected, expected_lse = numba_mla.extend(**problem)
    q, cache = problem["q"], problem["kv_cache"]

    wide = np.full((8, 5, 200), np.nan, np.float32)
    wide[:, 1:4, 7:87] = q
    by_heads = np.ascontiguousarray(q.swapaxes(0, 1)).swapaxes(0, 1)
    reverse = np.ascontiguousarray(q[::-1, ::-1])[::-1, ::-1]
    strided = np.repeat(q, 2, axis=2)[..., ::2]
    frozen = q.copy()
    frozen.flags.writeable = False
    for view in (wide[:, 1:4, 7:87], by_heads, reverse, strided, frozen):
        out, lse = numba_mla.extend(**(problem | {"q": view}))
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)

    padded = np.full((*cache.shape[:2], 100), np.nan, np.float32)
    padded[..., :80] = cache
    padded.flags.writeable = False
    layers = np.stack([cache, cache], axis=1)
    for view in (padded[..., :80], layers[:, 1]):
        np.testing.assert_array_equal(numba_mla.extend(**(problem | {"kv_cache": view}))[0], expected)

    out = np.zeros((3, 8, 70), np.float32).transpose(1, 0, 2)[..., 3:67]
    lse = np.zeros((3, 16), np.float32).T[::2]
    numba_mla.extend(**problem, out=out, lse=lse)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    strided_out = np.zeros((8, 3, 128), np.float32)
    numba_mla.extend(**problem, out=strided_out[..., ::2])
    np.testing.assert_array_equal(strided_out[..., ::2], expected)
    assert (strided_out[..., 1::2] == 0).all()


def test_strides_of_axes_of_size_one_are_not_looked_at(isa, rng):
    """numpy gives an axis of size 1 any stride, odd ones and 0 included."""
    problem = latent_problem(rng, 1, [5], [1], 8, 64, 16)
    problem["kv_cache"] = problem["kv_cache"][problem["block_table"][0, :1]]
    problem["block_table"] = [[0]]
    expected = numba_mla.extend(**problem)
    q, cache = problem["q"], problem["kv_cache"]
    for stride in (0, 1, 7, -3):
        odd_q = np.lib.stride_tricks.as_strided(q, q.shape, (stride, stride, 4))
        odd_cache = np.lib.stride_tricks.as_strided(cache, cache.shape, (stride, *cache.strides[1:]))
        out, lse = numba_mla.extend(**(problem | {"q": odd_q, "kv_cache": odd_cache}))
        assert out.tobytes() == expected[0].tobytes()
        assert lse.tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_output(isa, rng, dtype):
    problem = latent_problem(rng, 3, [50], [6], 16, 64, 16, dtype)
    out = np.empty((6, 3, 64), np.float32)
    assert_extends(problem, out=out)
    np.testing.assert_array_equal(out.astype(dtype), numba_mla.extend(**problem)[0])


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 50.0])
def test_any_scale(isa, rng, scale):
    """However small the scale, a masked key weighs exactly nothing."""
    problem = latent_problem(rng, 3, [300], [9], 16, 64, 16)
    assert_extends(problem | {"scale": scale})


def test_large_scores_do_not_overflow(isa, rng):
    problem = decode_problem(rng, 2, [600], 16, 64, 16)
    problem["q"] *= np.float32(1e12)
    out, lse = numba_mla.decode(**problem)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_element_offsets_beyond_two_to_the_31(isa, rng, tmp_path):
    """A sparse cache file: a page 2.1e9 elements in gives what page 0 gives."""
    path = tmp_path / "cache"
    cache = np.memmap(path, ml_dtypes.bfloat16, "w+", shape=(233018, 16, 576))
    cache[0] = cache[233017] = rng.standard_normal((16, 576)).astype(ml_dtypes.bfloat16)
    q = rng.standard_normal((1, 4, 576)).astype(ml_dtypes.bfloat16)
    near, far = (numba_mla.decode(q, cache, [[page]], [16], scale=0.1) for page in (0, 233017))
    np.testing.assert_array_equal(near[0], far[0])
    np.testing.assert_array_equal(near[1], far[1])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_extend_of_anything(data):
    """Shapes, lengths, pages and types that nobody thought of."""
    num_requests = data.draw(st.integers(0, 4))
    new_tokens = data.draw(st.lists(st.integers(0, 9), min_size=num_requests, max_size=num_requests))
    seq_lens = [n + data.draw(st.sampled_from([0, 1, 7, 255, 256, 1020, 1024])) for n in new_tokens]
    problem = latent_problem(
        np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))),
        data.draw(st.integers(1, 20)),
        seq_lens,
        new_tokens,
        data.draw(st.sampled_from([1, 2, 3, 16, 61, 64])),
        # At a width of 1 the tolerance of lse has room for one rounding, the product's, and none for its own.
        data.draw(st.integers(2, 70)),
        data.draw(st.integers(0, 20)),
        data.draw(st.sampled_from(DTYPES)),
        poison=data.draw(st.sampled_from([None, np.nan, np.inf])),
    )
    assert_extends(problem, causal=data.draw(st.booleans()))
