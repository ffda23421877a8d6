"""The tolerance passes honest rounding and fails planted errors; the input makers poison all they promise."""

import math

import ml_dtypes
import numpy as np
import pytest

from numba_mla import reference
from numba_mla.testing import inputs, tolerance

BF16 = ml_dtypes.bfloat16
NAN, INF = math.nan, math.inf


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def float32_decode(problem):
    """Decode in plain float32 numpy: an implementation with honest rounding errors."""
    q, cache = problem["q"].astype(np.float32), problem["kv_cache"].astype(np.float32)
    lanes = []
    for request, seq_len in enumerate(problem["seq_lens"]):
        rows = np.concatenate(cache[problem["block_table"][request, : -(-seq_len // cache.shape[1])]])[:seq_len]
        s = np.float32(problem["scale"]) * (q[request] @ rows.T)
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        total = p.sum(axis=-1)
        lanes.append((p, rows, total, s.max(axis=-1) + np.log(total)))
    return lanes


def average(p, rows, total, width):
    return p @ rows[:, :width] / total[:, None]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_honest_float32_is_within_the_tolerance_and_planted_errors_are_not(rng, dtype):
    problem = inputs.decode_problem(rng, 4, [300, 77], 16, 64, 16, dtype)
    bounds = tolerance.decode_bounds(**problem)
    lanes = float32_decode(problem)
    out = np.stack([average(p, rows, total, 64) for p, rows, total, _ in lanes]).astype(dtype)
    lse = np.stack([lane[3] for lane in lanes])
    assert bounds.excess(out, lse) <= 1

    unit = float(ml_dtypes.finfo(dtype).eps)
    wrong = out.astype(np.float64)
    wrong[1, 2, 3] += 4 * (bounds.out_bound[1, 2, 3] + unit * abs(wrong[1, 2, 3]))
    assert bounds.excess(wrong, lse) > 1
    wrong_lse = lse.copy()
    wrong_lse[0, 1] += 4 * bounds.lse_bound[0, 1]
    assert bounds.excess(out, wrong_lse) > 1
    assert bounds.excess(out, lse + np.log(300 / 299)) > 1  # one key too many

    forgotten = dict(problem, seq_lens=problem["seq_lens"] - 1)
    assert bounds.excess(*reference.decode(**forgotten)) > 1
    rescaled = dict(problem, scale=problem["scale"] * 1.001)
    assert bounds.excess(*reference.decode(**rescaled)) > 1


def test_rounded_probabilities_need_their_allowance(rng):
    problem = inputs.decode_problem(rng, 8, [600], 16, 64, 16, BF16)
    ((p, rows, total, lse),) = float32_decode(problem)
    out = average(p.astype(BF16).astype(np.float32), rows, total, 64)[None]
    exact = tolerance.decode_bounds(**problem, out_dtype=np.float32)
    rounded = tolerance.decode_bounds(**problem, out_dtype=np.float32, p_rounding=2.0**-8)
    assert rounded.excess(out, lse[None]) <= 1 < exact.excess(out, lse[None])


def test_bounds_follow_their_formula(rng):
    problem = inputs.latent_problem(rng, 2, [6], [3], 4, 5, 3, BF16, poison=NAN)
    bounds = tolerance.extend_bounds(**problem, p_rounding=2.0**-8)
    out, lse = reference.extend(**problem)
    np.testing.assert_array_equal(bounds.out, out)
    np.testing.assert_array_equal(bounds.lse, lse)
    rows = problem["kv_cache"][problem["block_table"][0, :2]].reshape(8, 8)[:6].astype(float)
    for token in range(3):
        n = 4 + token
        for head in range(2):
            q = problem["q"][token, head].astype(float)
            p = np.exp(problem["scale"] * rows[:n] @ q - lse[token, head])
            e_s = problem["scale"] * 8 * 2**-24 * (abs(rows[:n]) @ abs(q)).max()
            want = (2**-8 + 2 * e_s + n * 2**-24) * (p @ abs(rows[:n, :5])) + 2**-8 * abs(out[token, head])
            np.testing.assert_allclose(bounds.out_bound[token, head], want, rtol=1e-9)
            np.testing.assert_allclose(bounds.lse_bound[token, head], e_s + n * 2**-24 + 2**-22, rtol=1e-9)


def test_prefill_bounds_hold_the_reference_and_reject_top_left_masks(rng):
    problem = inputs.prefill_problem(rng, 2, [4], [7], 6, 5)
    bounds = tolerance.prefill_bounds(**problem)
    assert bounds.excess(*reference.prefill(**problem)) == 0
    top_left = dict(problem, k=problem["k"][:4], v=problem["v"][:4], kv_start_loc=[0, 4])
    assert bounds.excess(*reference.prefill(**top_left)) > 1


def test_bmm_bounds(rng):
    a, w = inputs.normal(rng, (2, 5, 300), np.float32), inputs.normal(rng, (2, 7, 300), np.float32)
    out, bound = tolerance.bmm_bounds(a, w, scale=0.3)
    got = np.float32(0.3) * (a @ w.swapaxes(1, 2))
    assert tolerance.excess(got, out, bound) <= 1
    got[1, 2, 3] -= np.float32(0.3) * a[1, 2, 299] * w[1, 3, 299]
    assert tolerance.excess(got, out, bound) > 1
    assert tolerance.excess((a.astype(BF16).astype(np.float32) @ w.swapaxes(1, 2)) * 0.3, out, bound) > 1


def test_merge_bounds_follow_their_formula():
    bounds = tolerance.merge_bounds(np.array([3.0]), 0.0, np.array([-1.0]), math.log(3), out_dtype=np.float32)
    d, u = math.log(3), 2.0**-24  # weights 1/4 and 3/4, out 0, average 3/2
    np.testing.assert_allclose(bounds.out_bound, 3 / 16 * (3 * d + 4) * u * 4 + 4 * u * 1.5, rtol=1e-9)
    np.testing.assert_allclose(bounds.lse_bound, (3 * d + 4) * u / 4 + u * math.log(4) + 2**-22, rtol=1e-9)


def test_honest_float32_merges_are_within_the_tolerance(rng):
    out_a, out_b = inputs.normal(rng, (2, 500, 16), np.float32)
    lse_a, lse_b = (20 * rng.standard_normal((2, 500))).astype(np.float32)
    highest = np.maximum(lse_a, lse_b)
    weight_a, weight_b = np.exp(lse_a - highest)[:, None], np.exp(lse_b - highest)[:, None]
    total = weight_a + weight_b
    out, lse = (weight_a * out_a + weight_b * out_b) / total, highest + np.log(total[:, 0])
    assert out.dtype == lse.dtype == np.float32
    assert tolerance.merge_bounds(out_a, lse_a, out_b, lse_b).excess(out, lse) <= 1


def test_merge_bounds_reject_what_is_off(rng):
    state_a, state_b = inputs.partial_states(rng, (50, 8), 4), inputs.partial_states(rng, (50, 8), 4)
    bounds = tolerance.merge_bounds(*state_a, *state_b)
    out, lse = bounds.out.astype(np.float32), bounds.lse.astype(np.float32)
    assert bounds.excess(out, lse) <= 1
    for delta in (1e-5, -1e-5):
        assert bounds.excess(out, lse + np.float32(delta)) > 1
        assert bounds.excess(out * np.float32(1 + delta), lse) > 1
    one_sided = np.isinf(state_a[1]) ^ np.isinf(state_b[1])
    assert one_sided.any()
    lse[one_sided] = np.nextafter(lse[one_sided], np.float32(INF))
    assert bounds.excess(out, lse) == INF


@pytest.mark.parametrize(
    ("actual", "expected", "want"),
    [
        ([1.0, NAN, INF, -INF], [1.0, NAN, INF, -INF], 0),
        ([1.0], [1.25], 0.5),
        ([NAN], [0.0], INF),
        ([0.0], [NAN], INF),
        ([INF], [-INF], INF),
        ([INF], [3e38], INF),
        ([-INF], [0.0], INF),
        ([], [], 0),
    ],
)
def test_excess(actual, expected, want):
    assert tolerance.excess(actual, expected, 0.5) == want


def test_excess_without_a_usable_bound():
    assert tolerance.excess([1.0], [1.0], 0.0) == 0
    assert tolerance.excess([1.0], [2.0], 0.0) == INF
    assert tolerance.excess([1.0], [2.0], NAN) == INF
    with pytest.raises(ValueError, match=r"actual: expected the shape of expected, \(2,\), got \(1,\)"):
        tolerance.excess([1.0], [1.0, 1.0], 1.0)


# The input makers


@pytest.mark.parametrize("shuffle", [True, False])
def test_paged_caches_poison_everything_unused(rng, shuffle):
    cache, table = inputs.paged_cache(rng, [5, 0, 8], 4, 3, BF16, shuffle=shuffle, poison=NAN)
    pages = [*table[0, :2], *table[2, :2]]
    assert len(set(pages)) == 4
    assert (sorted(pages) == pages) is not shuffle
    assert (np.delete(table.ravel(), [0, 1, 8, 9]) == inputs.UNUSED_PAGE_ID).all()
    assert np.isfinite(cache.astype(float)).all(axis=-1).sum() == 13
    assert np.isnan(cache.astype(float)).sum() == (cache[..., 0].size - 13) * 3
