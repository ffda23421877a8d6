"""Torch tensors as arrays: the same bits, strides and memory, or an error that names the argument."""

import ml_dtypes
import numpy as np
import pytest
import torch

import numba_mla
from numba_mla.integrations.torch import as_array, as_dtype

DTYPES = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
}
# Those that torch does not hand to numpy itself.
NARROW = list(DTYPES)[:3]


def names(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_dtypes(dtype):
    tensor = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 0.5]]).to(dtype)
    array = as_array(tensor)
    assert array.dtype == DTYPES[dtype]
    assert as_dtype(dtype) == array.dtype
    assert array.astype(np.float64).tolist() == tensor.double().tolist()


@pytest.mark.parametrize("dtype", NARROW, ids=names)
def test_every_bit_pattern(dtype):
    """NaN of any payload, infinities, negative zero and subnormal numbers included."""
    patterns = np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}")
    tensor = torch.from_numpy(patterns).view(dtype)
    array = as_array(tensor)
    assert (array.view(patterns.dtype) == patterns).all()
    np.testing.assert_array_equal(array.astype(np.float32), tensor.float().numpy())


VIEWS = {
    "transposed": lambda x: x.transpose(0, 2),
    "columns": lambda x: x[..., 1:3],
    "every other": lambda x: x[::2, 1::2, ::3],
    "expanded": lambda x: x[:, :1].expand(-1, 7, -1),
    "a row": lambda x: x[1, 2],
    "an element": lambda x: x[1, 2, 3],
    "nothing": lambda x: x[:, 3:3],
    "as strided": lambda x: x.as_strided((3, 2), (7, 2), 5),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=names)
def test_strides(dtype, view):
    tensor = VIEWS[view](torch.arange(60).reshape(4, 3, 5).to(dtype))
    array = as_array(tensor)
    assert array.shape == tuple(tensor.shape)
    assert array.astype(np.float32).tolist() == tensor.float().tolist()
    if array.size > 0:
        assert array.strides == tuple(stride * dtype.itemsize for stride in tensor.stride())
        assert array.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_memory_is_shared_both_ways(dtype):
    tensor = torch.zeros(2, 4, dtype=dtype)
    array = as_array(tensor.t())
    array[3, 1] = 1
    assert tensor.double().tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]
    tensor[0, 2] = 1
    assert array.astype(np.float64).tolist() == [[0, 0], [0, 0], [1, 0], [0, 1]]


def test_memory_outlives_the_tensor():
    array = as_array(torch.full((1000,), 3.0, dtype=torch.bfloat16))
    others = [torch.zeros(1000, dtype=torch.bfloat16) for _ in range(20)]
    assert (array == 3).all()
    del others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_tensors_of_a_model(dtype):
    """Parameters, which require gradients, and what inference mode makes."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    as_array(parameter)[1] = 2
    assert parameter.tolist() == [1, 2, 1]
    assert parameter.requires_grad
    with torch.inference_mode():
        made = torch.ones(3, dtype=dtype)
    as_array(made)[2] = 5
    assert made.tolist() == [1, 1, 5]


def test_an_operation_on_tensors(rng):
    """Its output is memory that torch made; small integers, of which products are exact."""
    a, w = (torch.from_numpy(rng.integers(-3, 4, shape)).bfloat16() for shape in ((3, 2, 8), (3, 4, 8)))
    out = torch.empty(2, 3, 4, dtype=torch.bfloat16)
    numba_mla.bmm(as_array(a), numba_mla.pack_weight(as_array(w)), out=as_array(out).swapaxes(0, 1))
    assert torch.equal(out.transpose(0, 1), a @ w.transpose(1, 2))


@pytest.mark.parametrize("given", [np.zeros(2), [1.0], 3.0, None, torch.float32], ids=lambda x: type(x).__name__)
def test_what_is_no_tensor(given):
    with pytest.raises(TypeError, match=rf"tensor: expected a torch\.Tensor, got {type(given).__name__}$"):
        as_array(given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_a_tensor_elsewhere(dtype):
    with pytest.raises(ValueError, match="tensor: expected one on the CPU, got meta"):
        as_array(torch.empty(2, dtype=dtype, device="meta"))
