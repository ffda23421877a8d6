"""Calls that nobody thought of: any layout, cache and metadata, valid or spoilt in one place."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numba_mla
from numba_mla.runtime import select_isa
from numba_mla.testing.inputs import latent_problem
from numba_mla.testing.tolerance import extend_bounds

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]
FP8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def contiguous(x):
    return x


def sliced(x):
    wide = np.full((x.shape[0] + 1, x.shape[1] + 2, x.shape[2] + 3), np.nan, np.float32).astype(x.dtype)
    wide[1:, 1:-1, 2:-1] = x
    return wide[1:, 1:-1, 2:-1]


def by_heads(x):
    return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)


def reversed_rows(x):
    return np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]


def strided(x):
    return np.repeat(x, 3, axis=2)[..., ::3]


def frozen(x):
    copy = x.copy()
    copy.flags.writeable = False
    return copy


QUERY_LAYOUTS = [contiguous, sliced, by_heads, reversed_rows, strided, frozen]
CACHE_LAYOUTS = [contiguous, sliced, reversed_rows, frozen]  # a strided last axis is refused


def used_requests(problem):
    return np.flatnonzero(problem["seq_lens"] > 0)


def spoil_page(draw, problem):
    r = int(draw(st.sampled_from(used_requests(problem).tolist())))
    used = -(-int(problem["seq_lens"][r]) // problem["kv_cache"].shape[1])
    bad = draw(st.sampled_from([-1, len(problem["kv_cache"]), 2**31 - 1]))
    problem["block_table"][r, draw(st.integers(0, used - 1))] = bad


def spoil_length(draw, problem):
    r = int(draw(st.sampled_from(used_requests(problem).tolist())))
    longest = problem["block_table"].shape[1] * problem["kv_cache"].shape[1]
    new = int(np.diff(problem["query_start_loc"])[r])
    problem["seq_lens"][r] = draw(st.sampled_from([-1, longest + 1, *([new - 1] if new > 1 else [])]))


def spoil_starts(draw, problem):
    problem["query_start_loc"][draw(st.sampled_from([0, -1]))] += draw(st.sampled_from([-1, 1]))


def spoil_scale(draw, problem):
    problem["scale"] = draw(st.sampled_from([0.0, -1.0, np.nan, np.inf, 1e-50, 1e300, "1", None]))


def spoil_width(draw, problem):
    problem["q"] = problem["q"][..., :-1]


def spoil_dtype(draw, problem):
    problem["q"] = problem["q"].astype(draw(st.sampled_from([np.float64, np.int32])))


SPOILERS = [spoil_page, spoil_length, spoil_starts, spoil_scale, spoil_width, spoil_dtype]


@st.composite
def problems(draw):
    """extend's arguments: shapes, pages, types, layouts; a quantised cache is written by write_cache."""
    num_requests = draw(st.integers(1, 4))
    new_tokens = draw(st.lists(st.integers(0, 6), min_size=num_requests, max_size=num_requests))
    seq_lens = [n + draw(st.sampled_from([0, 1, 9, 256, 1024])) for n in new_tokens]
    rank, rope = draw(st.integers(2, 40)), draw(st.integers(0, 20))
    dtype = draw(st.sampled_from(FLOATS))
    problem = latent_problem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(st.integers(1, 18)), seq_lens, new_tokens,
        draw(st.sampled_from([1, 3, 16, 64])), rank, rope, dtype,
    )  # fmt: skip
    stored = draw(st.sampled_from([None, *FP8]))
    if stored is not None:
        rows = problem["kv_cache"].reshape(-1, rank + rope)
        cache = np.zeros(problem["kv_cache"].shape, stored)
        problem["cache_scale"] = draw(st.sampled_from([0.25, 1.0, 0.07]))
        numba_mla.write_cache(rows[:, :rank], rows[:, rank:], cache, np.arange(len(rows)),
                              cache_scale=problem["cache_scale"])  # fmt: skip
        problem["kv_cache"] = cache
    return problem


@settings(max_examples=80, deadline=None)
@given(data=st.data(), problem=problems())
def test_a_valid_call_is_right_whatever_its_layout(data, problem):
    arranged = problem | {
        "q": data.draw(st.sampled_from(QUERY_LAYOUTS))(problem["q"]),
        "kv_cache": data.draw(st.sampled_from(CACHE_LAYOUTS))(problem["kv_cache"]),
    }
    causal = data.draw(st.booleans())
    out, lse = numba_mla.extend(**arranged, causal=causal)
    rounding = select_isa(None, problem["q"].dtype.name).p_rounding
    assert extend_bounds(**problem, causal=causal, p_rounding=rounding).excess(out, lse) <= 1


@settings(max_examples=80, deadline=None)
@given(data=st.data(), problem=problems())
def test_a_spoilt_call_is_refused_and_writes_nothing(data, problem):
    spoil = data.draw(st.sampled_from(SPOILERS))
    if spoil in (spoil_page, spoil_length) and not len(used_requests(problem)):
        spoil = spoil_scale
    out = np.full((*problem["q"].shape[:2], problem["kv_lora_rank"]), 7.0, np.float32)
    lse = np.full(out.shape[:2], 7.0, np.float32)
    spoil(data.draw, problem)
    with pytest.raises((ValueError, TypeError), match="expected"):
        numba_mla.extend(**problem, out=out, lse=lse)
    assert (out == 7).all()
    assert (lse == 7).all()
