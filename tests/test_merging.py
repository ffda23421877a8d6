"""merge_states: bit-exact selection where a side is empty, the tolerance elsewhere."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import numba_mla
from numba_mla.testing.inputs import latent_problem, partial_states
from numba_mla.testing.tolerance import merge_bounds

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype_b", DTYPES)
@pytest.mark.parametrize("dtype_a", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 128, 512])
def test_against_the_reference(isa, rng, width, dtype_a, dtype_b):
    a, b = partial_states(rng, (9, 7), width, dtype_a), partial_states(rng, (9, 7), width, dtype_b)
    out, lse = numba_mla.merge_states(*a, *b)
    assert out.dtype == dtype_a
    assert merge_bounds(*a, *b).excess(out, lse) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("empty_lse", [-np.inf, np.inf])
@pytest.mark.parametrize("content", [0.0, np.nan])
def test_an_empty_side_leaves_the_other_bit_exact(isa, rng, dtype, empty_lse, content):
    """(0, -inf) and (X, 1.5), any order, chains of three: bit-exactly (X, 1.5); +inf is empty too, NaN is not seen."""
    x = rng.standard_normal((3, 2, 33)).astype(dtype)
    lse = np.full((3, 2), 1.5, np.float32)
    empty = np.full_like(x, content), np.full_like(lse, empty_lse)
    for states in itertools.permutations([(x, lse), empty, empty]):
        first = numba_mla.merge_states(*states[0], *states[1])
        out, merged_lse = numba_mla.merge_states(*first, *states[2])
        assert out.tobytes() == x.tobytes()
        assert merged_lse.tobytes() == lse.tobytes()
    out, merged_lse = numba_mla.merge_states(*empty, *empty)
    assert (out == 0).all()
    assert (merged_lse == -np.inf).all()


def test_equal_sides_have_no_epsilon(isa):
    """merge(o, 0; o, 0) = (o, ln 2)."""
    o, zero = np.full((1, 1, 4), 0.1, np.float32), np.zeros((1, 1), np.float32)
    out, lse = numba_mla.merge_states(o, zero, o, zero)
    assert out.tobytes() == o.tobytes()
    assert lse.item() == np.float32(np.log(2))


def test_in_place_and_strided(isa, rng):
    """out is an input, lse is an input, in every combination."""
    a, b = partial_states(rng, (6, 5), 16), partial_states(rng, (6, 5), 16)
    expected = numba_mla.merge_states(*a, *b)
    for out_is, lse_is in itertools.product((0, 1), repeat=2):
        copies = [(o.copy(), length.copy()) for o, length in (a, b)]
        out, lse = copies[out_is][0], copies[lse_is][1]
        returned = numba_mla.merge_states(*copies[0], *copies[1], out=out, lse=lse)
        assert returned[0] is out
        assert returned[1] is lse
        np.testing.assert_array_equal(out, expected[0])
        np.testing.assert_array_equal(lse, expected[1])
    by_heads = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (*a, *b)]
    out = np.empty((5, 6, 16), np.float32).swapaxes(0, 1)
    numba_mla.merge_states(*by_heads, out=out)
    np.testing.assert_array_equal(out, expected[0])


def test_an_output_that_overlaps_an_input_by_a_row(isa, rng):
    a, b = partial_states(rng, (6, 5), 16), partial_states(rng, (6, 5), 16)
    expected = numba_mla.merge_states(*a, *b)[0]
    buffer = np.empty((7, 5, 16), np.float32)
    buffer[:6] = a[0]
    numba_mla.merge_states(buffer[:6], a[1], *b, out=buffer[1:])
    np.testing.assert_array_equal(buffer[1:], expected)


def test_prefixes_in_chunks_merge_to_the_whole(isa, rng):
    """Prefixes [9, 0, 4] through context chunks of 4: equal to unchunked, and each request to itself run alone."""
    problem = latent_problem(rng, 3, [9, 0, 4], [1, 1, 1], 4, 64, 16, poison=np.nan)
    problem |= {"causal": False, "validate": False}

    def by_chunks(problem):
        lens = np.asarray(problem["seq_lens"])
        merged = None
        for chunk in range(3):
            present = np.clip(lens - 4 * chunk, 0, 4)
            table = problem["block_table"][:, chunk : chunk + 1]
            part = numba_mla.extend(**(problem | {"block_table": table, "seq_lens": present}))
            merged = part if merged is None else numba_mla.merge_states(*merged, *part)
        return merged

    whole, merged = numba_mla.extend(**problem), by_chunks(problem)
    np.testing.assert_allclose(merged[0], whole[0], rtol=0, atol=2**-20)
    np.testing.assert_allclose(merged[1], whole[1], rtol=0, atol=2**-20)
    assert (merged[0][1] == 0).all()
    assert (merged[1][1] == -np.inf).all()
    for request in range(3):
        rows = slice(request, request + 1)
        own = {name: problem[name][rows] for name in ("q", "block_table", "seq_lens")}
        alone = by_chunks(problem | own | {"query_start_loc": [0, 1]})
        assert [x.tobytes() for x in alone] == [x[rows].tobytes() for x in merged]


def test_two_halves_of_a_prefix_merge_to_the_whole(isa, rng):
    problem = latent_problem(rng, 4, [96], [1], 16, 64, 16)
    whole = numba_mla.extend(**problem)
    halves = [
        numba_mla.extend(**(problem | {"block_table": problem["block_table"][:, pages], "seq_lens": [48]}))
        for pages in (slice(0, 3), slice(3, 6))
    ]
    out, lse = numba_mla.merge_states(*halves[0], *halves[1])
    np.testing.assert_allclose(out, whole[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, whole[1], rtol=0, atol=1e-5)
