"""prefill against the float64 reference on the same bits, within the one tolerance."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numba_mla
from numba_mla.kernels.schedule import AUTO, END, NUM_LANES, NUM_SPLITS, Cut, plan_attention
from numba_mla.runtime import select_isa, workspace
from numba_mla.testing.inputs import prefill_problem
from numba_mla.testing.tolerance import prefill_bounds

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def p_rounding(problem):
    """u_P of the instruction set in force for a problem's element type."""
    return select_isa(None, problem["q"].dtype.name).p_rounding


def assert_prefills(problem, causal=True):
    out, lse = numba_mla.prefill(**problem, causal=causal)
    assert prefill_bounds(**problem, causal=causal, p_rounding=p_rounding(problem)).excess(out, lse) <= 1
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(192, 128), (96, 64), (40, 33), (7, 5), (1, 1)])
def test_ragged(isa, rng, qk_dim, v_dim, dtype, causal):
    assert_prefills(prefill_problem(rng, 3, [70, 1, 0, 300, 5], None, qk_dim, v_dim, dtype), causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_of_different_lengths(isa, rng, dtype):
    assert_prefills(prefill_problem(rng, 2, [5, 3, 0, 40], [300, 3, 9, 1100], 24, 16, dtype))


def test_more_queries_than_keys_align_bottom_right(isa, rng):
    """5 queries over 2 keys: three see nothing, then one key, then two."""
    problem = prefill_problem(rng, 2, [5], [2], 24, 16)
    out, lse = assert_prefills(problem)
    assert (out[:3] == 0).all()
    assert (lse[:3] == -np.inf).all()
    np.testing.assert_array_equal(out[3], problem["v"][0])
    assert_prefills(prefill_problem(rng, 2, [5, 4], [0, 2], 24, 16))


def test_queries_far_before_the_first_key_are_empty(isa, rng):
    """More of them than a split has keys; what scratch memory held before is not taken for a state."""
    problem = prefill_problem(rng, 1, [1100], [2], 24, 16)
    numba_mla.prefill(**problem)
    workspace.kept.array[:] = 0xFF  # NaN
    out, lse = assert_prefills(problem)
    assert (out[:1098] == 0).all()
    assert (lse[:1098] == -np.inf).all()


def test_a_plan_has_no_groups_that_end_before_the_first_key():
    """Queries that lie more than a split before the first key: no item has a negative number of splits."""
    starts = np.array([0, 3000])
    items, groups, _, _ = plan_attention(np.array([2]), starts, 1, 1, 1, Cut(32, 32, 16, 1024, AUTO), 2)
    assert groups[:, NUM_LANES].sum() == 3000
    assert groups[:, END].max() == 2
    assert groups[:, END].min() == 0
    assert items[:, NUM_SPLITS].min() == 0


def test_queries_equal_to_zero_and_not_a_number(isa, rng):
    """q = 0 and 8 keys: lse = ln 8; NaN in q gives a NaN row, never zeros, and no other."""
    problem = prefill_problem(rng, 2, [3, 1], [8, 8], 24, 16)
    problem["q"][:] = 0
    problem["q"][1, 0, 5] = np.nan
    out, lse = numba_mla.prefill(**problem, causal=False)
    expected = np.full((4, 2), np.log(8))
    expected[1, 0] = np.nan
    np.testing.assert_allclose(lse, expected, rtol=0, atol=2**-21)
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1), np.isnan(expected))
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), np.isnan(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [1, 3, 16])
def test_bits_do_not_depend_on_threads_batch_or_head(isa, rng, num_heads, dtype):
    problem = prefill_problem(rng, num_heads, [1100, 70], [2100, 70], 24, 16, dtype)
    with numba_mla.threads(1):
        out, lse = numba_mla.prefill(**problem)
    for _ in range(3):
        again = numba_mla.prefill(**problem)
        assert again[0].tobytes() == out.tobytes()
        assert again[1].tobytes() == lse.tobytes()
    second = {name: problem[name][1100 if name == "q" else 2100 :] for name in "qkv"}
    alone = numba_mla.prefill(**second, query_start_loc=[0, 70], scale=problem["scale"])
    assert alone[0].tobytes() == out[1100:].tobytes()
    head = {name: problem[name][:, -1:] for name in "qkv"}
    assert numba_mla.prefill(**(problem | head))[0].tobytes() == np.ascontiguousarray(out[:, -1:]).tobytes()


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_unseen_rows_add_nothing(isa, rng, where, bad):
    """The last key of a causal prompt is seen by the last query alone; another request's by none."""
    problem = prefill_problem(rng, 2, [40, 9], None, 24, 16)
    clean, clean_lse = numba_mla.prefill(**problem)
    problem[where][39] = bad
    out, lse = numba_mla.prefill(**problem)
    others = np.arange(49) != 39
    assert out[others].tobytes() == clean[others].tobytes()
    assert lse[others].tobytes() == clean_lse[others].tobytes()
    if np.isnan(bad):
        assert np.isnan(out[39]).all()


def test_layouts(isa, rng):
    problem = prefill_problem(rng, 3, [20, 30], None, 24, 16)
    expected = numba_mla.prefill(**problem)
    kv = np.concatenate([problem["k"], problem["v"]], axis=2)
    views = {"k": kv[..., :24], "v": kv[..., 24:], "q": np.repeat(problem["q"], 2, axis=2)[..., ::2]}
    by_heads = {n: np.ascontiguousarray(problem[n].swapaxes(0, 1)).swapaxes(0, 1) for n in "qkv"}
    for changed in (views, by_heads):
        np.testing.assert_array_equal(numba_mla.prefill(**(problem | changed))[0], expected[0])
    out, lse = np.zeros((50, 3, 40), np.float32)[..., 1:17], np.zeros((3, 50), np.float32).T
    numba_mla.prefill(**problem, out=out, lse=lse)
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])


def test_empty_batches(isa):
    q, k, v = np.zeros((0, 2, 4), np.float32), np.zeros((0, 2, 4), np.float32), np.zeros((0, 2, 3), np.float32)
    for starts in ([0], [0, 0, 0]):
        out, lse = numba_mla.prefill(q, k, v, starts, scale=1.0)
        assert out.shape == (0, 2, 3)
        assert lse.shape == (0, 2)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_anything(data):
    lens = data.draw(st.lists(st.sampled_from([0, 1, 3, 8, 65, 130]), max_size=4))
    kv_lens = [data.draw(st.sampled_from([0, 1, n, n + 7, n + 256])) for n in lens]
    problem = prefill_problem(
        np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))),
        data.draw(st.integers(1, 4)),
        lens,
        kv_lens,
        # At a width of 1 the tolerance of lse has room for one rounding, the product's, and none for its own.
        data.draw(st.integers(2, 70)),
        data.draw(st.integers(1, 70)),
        data.draw(st.sampled_from(DTYPES)),
    )
    assert_prefills(problem, data.draw(st.booleans()))
