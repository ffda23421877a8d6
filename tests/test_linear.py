"""pack_weight, bmm and absorb_weights."""

import ml_dtypes
import numpy as np
import pytest

import numba_mla
from numba_mla.kernels.product import spread
from numba_mla.testing.tolerance import bmm_bounds, excess

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1),
        (2, 3, 5, 7),
        (3, 16, 128, 512),
        (1, 33, 65, 31),
        (2, 17, 63, 1100),
        (1, 130, 200, 96),
        (5, 1, 64, 512),
    ],
    ids=lambda s: "{}x{}x{}x{}".format(*s),
)
def test_bmm(isa, rng, shape, dtype):
    heads, m, n, k = shape
    a = rng.standard_normal((heads, m, k)).astype(dtype)
    w = rng.standard_normal((heads, n, k)).astype(dtype)
    expected, bound = bmm_bounds(a, w)
    out = numba_mla.bmm(a, numba_mla.pack_weight(w))
    assert out.dtype == dtype
    assert excess(out, expected, bound) <= 1


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8, 64])
def test_every_item_has_its_turn(num_workers):
    for num_items in (1, 2, 7, 64, 65):
        items = [spread.py_func(turn, num_items, num_workers) for turn in range(num_items)]
        assert sorted(items) == list(range(num_items))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("edge", [1, 15, 16, 17, 31, 33])
def test_rims_leave_their_surroundings_alone(isa, rng, edge, dtype):
    """Output views with canaries all round; M, N and K in {1, 15, 16, 17, 31, 33}, one of them unlike the others."""
    for m, n, k in ((edge, edge, 19), (edge, 33, edge), (17, edge, edge)):
        a = rng.standard_normal((2, m, k)).astype(dtype)
        w = rng.standard_normal((2, n, k)).astype(dtype)
        expected, bound = bmm_bounds(a, w)
        frame = np.full((4, m + 2, n + 2), 7.5, dtype)
        numba_mla.bmm(a, numba_mla.pack_weight(w), out=frame[1:3, 1:-1, 1:-1])
        assert excess(frame[1:3, 1:-1, 1:-1], expected, bound) <= 1
        frame[1:3, 1:-1, 1:-1] = 7.5
        assert (frame == 7.5).all()


def test_layouts(isa, rng):
    a = rng.standard_normal((3, 20, 40), dtype=np.float32)
    w = rng.standard_normal((3, 50, 40), dtype=np.float32)
    packed = numba_mla.pack_weight(w)
    expected = numba_mla.bmm(a, packed)
    transposed = np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1)
    last_strided = np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)
    frozen = a.copy()
    frozen.flags.writeable = False
    for view in (transposed, last_strided, frozen, a[:, ::-1][:, ::-1]):
        np.testing.assert_array_equal(numba_mla.bmm(view, packed), expected)
    out = np.empty((20, 3, 50), np.float32).swapaxes(0, 1)
    assert numba_mla.bmm(a, packed, out=out) is out
    np.testing.assert_array_equal(out, expected)
    strided = np.zeros((3, 20, 100), np.float32)[..., ::2]
    numba_mla.bmm(a, packed, out=strided)
    np.testing.assert_array_equal(strided, expected)
    for view in (w.swapaxes(0, 0)[:, ::-1][:, ::-1], np.asfortranarray(w)):
        np.testing.assert_array_equal(numba_mla.bmm(a, numba_mla.pack_weight(view)), expected)


def test_scale_at_packing_and_at_the_product(isa, rng):
    a = rng.standard_normal((1, 4, 40), dtype=np.float32)
    w = rng.standard_normal((1, 5, 40), dtype=np.float32)
    expected, bound = bmm_bounds(a, w, scale=0.3)
    assert excess(numba_mla.bmm(a, numba_mla.pack_weight(w), scale=0.3), expected, bound) <= 1
    assert excess(numba_mla.bmm(a, numba_mla.pack_weight(w, scale=0.3)), expected, bound) <= 1
    with pytest.raises(ValueError, match="scale: expected None"):
        numba_mla.bmm(a, numba_mla.pack_weight(w, scale=0.3), scale=2.0)


def test_float16_sums_beyond_its_range_stay_float32(isa):
    """q = 200, W = 30, K = 16: the sum of 96000 is finite in float32, and infinite only once it is float16."""
    a, w = np.full((1, 1, 16), 200, np.float16), np.full((1, 1, 16), 30, np.float16)
    out = np.empty((1, 1, 1), np.float32)
    assert numba_mla.bmm(a, numba_mla.pack_weight(w), out=out).item() == 96000
    assert numba_mla.bmm(a, numba_mla.pack_weight(w)).item() == np.inf


@pytest.mark.parametrize("shape", [(2, 0, 5, 4), (0, 3, 5, 4), (2, 3, 0, 4), (2, 3, 5, 0)], ids=str)
def test_empty_axes(isa, shape):
    heads, m, n, k = shape
    packed = numba_mla.pack_weight(np.ones((heads, n, k), np.float32))
    out = numba_mla.bmm(np.ones((heads, m, k), np.float32), packed)
    assert out.shape == (heads, m, n)
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_absorbed_weights_give_what_the_projection_gives(isa, rng, dtype):
    heads, nope, value, rank = 3, 8, 6, 24
    kv_b = rng.standard_normal((heads * (nope + value), rank)).astype(dtype)
    w_uk, w_uv = numba_mla.absorb_weights(kv_b, heads, nope, value)
    kv = (rng.standard_normal((10, rank)) @ kv_b.astype(np.float64).T).reshape(10, heads, nope + value)
    latent = np.linalg.lstsq(kv_b.astype(np.float64), kv.reshape(10, -1).T, rcond=None)[0].T
    q = rng.standard_normal((10, heads, nope))
    np.testing.assert_allclose(
        np.einsum("thn,hdn,td->th", q, w_uk.astype(float), latent),
        np.einsum("thn,thn->th", q, kv[..., :nope]),
    )
    np.testing.assert_allclose(np.einsum("hvd,td->thv", w_uv.astype(float), latent), kv[..., nope:])
