"""Torch tensors as numpy arrays: the same memory, no copy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

# Types that torch does not hand to numpy: the integers that carry their bits, and numpy's name for them.
_CARRIERS = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return an array over a tensor's memory.

    Parameters
    ----------
    tensor : torch.Tensor
        On the CPU, any shape and strides. bfloat16, float8_e4m3fn and float8_e5m2 become the ml_dtypes of these
        names, other types what torch makes of them.

    Returns
    -------
    ndarray
        Of the same shape and strides; what is written to one is seen in the other.

    Raises
    ------
    TypeError
        If it is not a tensor.
    ValueError
        If it is not on the CPU.

    Examples
    --------
    >>> import torch
    >>> tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    >>> array = as_array(tensor)
    >>> array[0, 0] = 2
    >>> array.dtype, float(tensor[0, 0])
    (dtype(bfloat16), 2.0)
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"tensor: expected one on the CPU, got {tensor.device}")
    tensor = tensor.detach()
    carrier, dtype = _CARRIERS.get(tensor.dtype, (None, None))
    if carrier is None:
        return tensor.numpy()
    return tensor.view(carrier).numpy().view(dtype)


def as_dtype(dtype: torch.dtype) -> np.dtype:
    """Return numpy's (or ml_dtypes') name for torch's type.

    Examples
    --------
    >>> as_dtype(torch.bfloat16), as_dtype(torch.float32)
    (dtype(bfloat16), dtype('float32'))
    """
    return as_array(torch.empty(0, dtype=dtype)).dtype
