"""The building blocks against float64, one by one and as attention over a sliding window; what they refuse."""

import inspect
import re
import subprocess
import sys

import ml_dtypes
import numba
import numpy as np
import pytest

import numba_mla
from numba_mla import jit, reference
from numba_mla.runtime import select_isa
from numba_mla.testing.tolerance import bmm_bounds, excess, masked_bounds

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
SCALE = 0.3


def draw(rng, shape, dtype):
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


@numba.njit
def scores_of(kernels, q, k, scores):
    group = jit.lane_group(kernels, len(q) + 3, len(k) + 5, q.shape[1], 1, 1.0)
    for start in range(2):
        jit.pack(group, q[start:])
    scores[:] = jit.score(group, k)


@pytest.mark.parametrize("key_dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(("lanes", "keys", "width"), [(1, 1, 1), (17, 33, 7), (16, 64, 64), (40, 100, 192)])
def test_scores(isa, rng, lanes, keys, width, dtype, key_dtype):
    """Queries after queries in one group; rows read in place and converted; all are rounded to the native type."""
    q, k = draw(rng, (lanes + 1, width), dtype), draw(rng, (keys, width), key_dtype)
    kernels = jit.kernels(dtype)
    scores = np.empty((keys, lanes), np.float32)
    scores_of(kernels, q, k, scores)
    seen = k.astype(select_isa(None, dtype.name).native)
    expected, bound = bmm_bounds(seen[None], q[None, 1:], out_dtype=np.float32)
    assert excess(scores, expected[0], bound[0]) <= 1


@numba.njit
def attend(kernels, q, k, v, tile, scale, hidden, out, lse):
    """Attention whose scores are changed by hand: `hidden` is [key, lane]."""
    group = jit.lane_group(kernels, len(q), tile, q.shape[1], v.shape[1], scale)
    jit.pack(group, q)
    for start in range(0, len(k), tile):
        scores = jit.score(group, k[start : start + tile])
        for key in range(scores.shape[0]):
            for lane in range(scores.shape[1]):
                if hidden[start + key, lane]:
                    scores[key, lane] = -np.inf
        jit.softmax(group)
        jit.weigh_values(group, v[start : start + tile])
    jit.finish(group, out, lse)


@pytest.mark.parametrize("out_dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(
    ("lanes", "keys", "tile", "width", "value_width"),
    [(1, 1, 4, 1, 1), (19, 70, 32, 24, 40), (33, 130, 64, 64, 64), (48, 96, 48, 192, 128)],
)
def test_any_mask(isa, rng, lanes, keys, tile, width, value_width, dtype, out_dtype):
    """Scores, softmax and values over several tiles; the first lane sees no key at all."""
    q, k, v = (draw(rng, shape, dtype) for shape in ((lanes, width), (keys, width), (keys, value_width)))
    hidden = rng.random((keys, lanes)) < 0.4
    hidden[:, 0] = True
    kernels = jit.kernels(dtype)
    out, lse = np.full((lanes, value_width), np.nan, out_dtype), np.full(lanes, np.nan, np.float32)
    attend(kernels, q, k, v, tile, SCALE, hidden, out, lse)
    bounds = masked_bounds(q, k, v, ~hidden.T, scale=SCALE, p_rounding=kernels.p_rounding, out_dtype=out_dtype)
    assert bounds.excess(out, lse) <= 1
    assert (out[0] == 0).all()
    assert lse[0] == -np.inf


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_rows_of_fp8(isa, rng, dtype):
    q, k, v = draw(rng, (20, 64), BFLOAT16), draw(rng, (70, 64), dtype), draw(rng, (70, 48), dtype)
    kernels, hidden = jit.kernels(BFLOAT16), np.zeros((70, 20), bool)
    out, lse = np.empty((20, 48), np.float32), np.empty(20, np.float32)
    attend(kernels, q, k, v, 32, SCALE, hidden, out, lse)
    bounds = masked_bounds(q, k, v, ~hidden.T, scale=SCALE, p_rounding=kernels.p_rounding, out_dtype=FLOAT32)
    assert bounds.excess(out, lse) <= 1


def test_arrays_of_every_layout_give_the_same_bits(isa, rng):
    """Reversed rows, rows of one head among several, rows that may not be written."""
    q, k, v = (draw(rng, shape, BFLOAT16) for shape in ((20, 3, 64), (70, 3, 64), (70, 3, 32)))
    results = []
    for one in (np.ascontiguousarray, lambda x: x, lambda x: np.ascontiguousarray(x[::-1])[::-1]):
        arrays = [one(x[:, 1]) for x in (q, k, v)]
        for x in arrays:
            x.flags.writeable = one is np.ascontiguousarray
        out, lse = np.empty((20, 32), BFLOAT16), np.empty(20, np.float32)
        attend(jit.kernels(BFLOAT16), *arrays, 32, SCALE, np.zeros((70, 20), bool), out, lse)
        results.append((out.tobytes(), lse.tobytes()))
    assert results[0] == results[1] == results[2]


@numba.njit(parallel=True, nogil=True)
def sliding_window(kernels, q, k, v, window, scale, out, lse):
    """Query t of every head sees the last `window` keys up to its own."""
    num_tokens, num_heads, width = q.shape
    blocks = -(-num_tokens // 128)
    for item in numba.prange(num_heads * blocks):
        head, first = item // blocks, item % blocks * 128
        last = min(first + 128, num_tokens)
        group = jit.lane_group(kernels, 128, 256, width, v.shape[2], scale)
        jit.pack(group, q[first:last, head])
        high = np.arange(first + 1, last + 1)
        for start in range(max(0, first + 1 - window), last, 256):
            stop = min(start + 256, last)
            jit.score(group, k[start:stop, head])
            jit.mask(group, start, high - window, high)
            jit.softmax(group)
            jit.weigh_values(group, v[start:stop, head])
        jit.finish(group, out[first:last, head], lse[first:last, head])
    jit.check(kernels)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(("num_tokens", "window"), [(300, 70), (150, 1), (140, 500)])
def test_a_sliding_window(isa, rng, num_tokens, window, dtype):
    q, k, v = (draw(rng, (num_tokens, 2, width), dtype) for width in (192, 192, 128))
    kernels, results = jit.kernels(dtype), set()
    for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
        numba.set_num_threads(threads)
        out, lse = np.full((num_tokens, 2, 128), np.nan, dtype), np.full((num_tokens, 2), np.nan, np.float32)
        sliding_window(kernels, q, k, v, window, 192**-0.5, out, lse)
        results.add((out.tobytes(), lse.tobytes()))
    assert len(results) == 1
    ago = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
    visible = (ago >= 0) & (ago < window)
    for head in range(2):
        one = (x[:, head] for x in (q, k, v))
        bounds = masked_bounds(*one, visible, scale=192**-0.5, p_rounding=kernels.p_rounding)
        assert bounds.excess(out[:, head], lse[:, head]) <= 1


def test_a_window_without_an_end_is_the_package_s_own_attention(isa, rng):
    q, k, v = (draw(rng, (300, 2, width), BFLOAT16) for width in (192, 192, 128))
    out, lse = np.empty_like(v), np.empty((300, 2), np.float32)
    sliding_window(jit.kernels(BFLOAT16), q, k, v, 300, 192**-0.5, out, lse)
    own, own_lse = numba_mla.prefill(q, k, v, [0, 300], scale=192**-0.5)
    np.testing.assert_array_equal(lse, own_lse)
    np.testing.assert_array_equal(out, own)


@numba.njit
def misuse(kernels, rows, short, step, sizes, scale):
    """Each step is one call out of turn or out of shape; step -1 is a right sequence."""
    group = jit.lane_group(kernels, sizes, sizes, 4, 4, scale)
    if step == 0:
        jit.score(group, rows)
    jit.pack(group, short if step == 1 else rows)
    if step == 2:
        jit.mask(group, 0, np.zeros(8, np.int64), np.ones(8, np.int64))
    if step == 3:
        jit.softmax(group)
    jit.score(group, short if step == 4 else rows)
    if step == 5:
        jit.score(group, rows)
    if step == 6:
        jit.mask(group, 0, np.zeros(7, np.int64), np.ones(8, np.int64))
    if step == 7:
        jit.weigh_values(group, rows)
    if step == 8:
        jit.finish(group, rows, np.zeros(8))
    jit.softmax(group)
    if step == 9:
        jit.softmax(group)
    jit.weigh_values(group, rows[:7] if step == 10 else rows)
    jit.finish(group, rows[:7] if step == 11 else rows, np.zeros(7 if step == 12 else 8))
    if step == 13:
        jit.finish(group, rows, np.zeros(8))


MISUSE = ["score: expected a lane group after pack", r"queries: expected shape (1 to 8, 4), got (8, 3)",
          "mask: expected a lane group after score", "softmax: expected a lane group after score",
          "keys: expected shape (1 to 8, 4), got (8, 3)", "score: expected a lane group after pack",
          "low: expected shape (8,), got (7,)", "weigh_values: expected a lane group after softmax",
          "finish: expected a lane group after pack", "softmax: expected a lane group after score",
          "values: expected shape (8 to 8, 4), got (7, 4)", "out: expected shape (8 to 8, 4), got (7, 4)",
          "lse: expected shape (8,), got (7,)", "finish: expected a lane group after pack"]  # fmt: skip


@pytest.mark.parametrize("step", range(len(MISUSE)))
def test_misuse_is_refused(step):
    kernels, rows = jit.kernels(FLOAT32), np.zeros((8, 4), np.float32)
    misuse(kernels, rows, rows[:, :3], -1, 8, SCALE)
    with pytest.raises(ValueError, match=re.escape(MISUSE[step])):
        misuse(kernels, rows, rows[:, :3], step, 8, SCALE)


def test_other_misuse_is_refused():
    rows = np.zeros((8, 4), np.float32)
    kernels = jit.kernels(FLOAT32)
    with pytest.raises(ValueError, match=r"queries: expected shape \(1 to 7, 4\), got \(8, 4\)"):
        misuse(kernels, rows, rows[:, :3], -1, 7, SCALE)
    with pytest.raises(ValueError, match="queries: expected a contiguous last axis, got strides of 8 bytes"):
        misuse(kernels, np.zeros((8, 8), np.float32)[:, ::2], rows, -1, 8, SCALE)
    with pytest.raises(ValueError, match="num_lanes, num_keys, width and value_width of at least 1"):
        misuse(kernels, rows, rows[:, :3], -1, 0, SCALE)
    for scale in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="scale: expected a finite and positive number"):
            misuse(kernels, rows, rows[:, :3], -1, 8, scale)
    with pytest.raises(numba.TypingError, match="expected an array of float32"):
        misuse(kernels, rows.astype(np.float64), rows, -1, 8, SCALE)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.float8_e5m2, "nothing", None])
def test_kernels_of_other_types_are_refused(dtype):
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16, got"):
        jit.kernels(dtype)


def test_kernels_follow_the_instruction_set_in_force(vector_isa):
    assert jit.kernels(FLOAT32, isa="generic").isa == "generic"
    record = select_isa(None, "bfloat16")
    kernels = jit.kernels(BFLOAT16)
    assert (kernels.isa, kernels.dtype, kernels.p_rounding) == (record.name, BFLOAT16, record.p_rounding)
    with pytest.raises(numba_mla.IsaUnavailableError):
        jit.kernels(BFLOAT16, isa="nothing")


def test_queries_of_another_type_than_the_kernels_take(vector_isa):
    record = select_isa(None, "bfloat16")
    rows, kernels = np.zeros((8, 4), np.float32), jit.kernels(BFLOAT16)
    if "float32" in record.dtypes:
        misuse(kernels, rows, rows[:, :3], -1, 8, SCALE)
    else:
        with pytest.raises(ValueError, match="queries: expected elements of the type that the kernels are for"):
            misuse(kernels, rows, rows[:, :3], -1, 8, SCALE)


def test_what_numba_drops_in_a_prange_is_found_by_check(rng):
    q, k, v = (draw(rng, (10, 2, width), FLOAT32) for width in (8, 8, 4))
    out, lse, kernels = np.zeros((10, 2, 5), np.float32), np.zeros((10, 2), np.float32), jit.kernels(FLOAT32)
    with pytest.raises(ValueError, match="a block was refused in a prange"):
        sliding_window(kernels, q, k, v, 4, SCALE, out, lse)
    sliding_window(kernels, q, k, v, 4, SCALE, np.empty_like(v), lse)


@pytest.mark.parametrize("name", [name for name in jit.__all__ if hasattr(getattr(jit, name), "py_func")])
def test_documented_arguments_are_the_signature(name):
    function = getattr(jit, name).py_func
    parameters = re.search(r"Parameters\n-+\n(.*?)(\n\n|\Z)", inspect.getdoc(function), re.S).group(1)
    documented = re.findall(r"^(\w[\w, ]*?)(?: : .*)?$", parameters, re.M)
    assert [n for line in documented for n in line.split(", ")] == list(inspect.signature(function).parameters)


def test_the_package_itself_does_not_import_it():
    code = "import sys, numba_mla; print('numba_mla.jit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_the_oracle_of_any_mask_is_the_reference_s_where_that_is_causal(rng):
    q, k, v = (draw(rng, (9, width), FLOAT32) for width in (8, 8, 4))
    bounds = masked_bounds(q, k, v, np.tri(9, dtype=bool), scale=SCALE)
    out, lse = reference.prefill(q[:, None], k[:, None], v[:, None], [0, 9], scale=SCALE)
    np.testing.assert_allclose(bounds.out, out[:, 0])
    np.testing.assert_allclose(bounds.lse, lse[:, 0])
