"""fp8: weights with block scales, and the layouts of a cache's rows."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from .checks import FLOAT_DTYPES, check_array, check_count, describe

FLOAT8_E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_DTYPES = (FLOAT8_E4M3FN, np.dtype(ml_dtypes.float8_e5m2))

# FlashMLA's row of 656 bytes: 512 e4m3fn codes, 4 float32 scales, one for each 128 of them, 64 bfloat16.
DS_BYTES = 656
DS_LATENT, DS_ROTARY = 512, 64


class BlockScaled(NamedTuple):
    """An fp8 weight with a scale for each block: value = weight * its block's scale.

    Attributes
    ----------
    weight : ndarray (..., N, K)
        float8_e4m3fn or float8_e5m2.
    scale : ndarray (..., ceil(N / bn), ceil(K / bk))
        float32.
    block_size : tuple of int
        (bn, bk).
    """

    weight: np.ndarray
    scale: np.ndarray
    block_size: tuple[int, int]


def is_fp8(dtype: np.dtype) -> bool:
    """Whether an element type is one of the two fp8 formats."""
    return dtype in FLOAT8_DTYPES


def is_ds_layout(kv_cache: np.ndarray) -> bool:
    """Whether a cache has rows of 656 bytes."""
    return kv_cache.dtype == np.uint8 and kv_cache.shape[-1] == DS_BYTES


def row_width(kv_cache: np.ndarray) -> int:
    """Values of a cache's row, Dc + Dr."""
    return DS_LATENT + DS_ROTARY if is_ds_layout(kv_cache) else kv_cache.shape[-1]


def check_block_size(block_size) -> tuple[int, int]:
    """Rows and columns of a block."""
    if not isinstance(block_size, (tuple, list)) or len(block_size) != 2:
        raise TypeError(f"block_size: expected a pair (bn, bk) of integers, got {describe(block_size)}")
    return check_count("block_size[0]", block_size[0], 1), check_count("block_size[1]", block_size[1], 1)


def check_block_scales(name: str, scale, shape: tuple[int, ...]) -> np.ndarray:
    """Scales of blocks as float32: of the given shape, finite and positive."""
    check_array(name, scale, shape, FLOAT_DTYPES)
    scales = scale.astype(np.float32)
    usable = np.isfinite(scales) & (scales >= np.finfo(np.float32).tiny)
    if not usable.all():
        raise ValueError(f"{name}: expected finite and positive scales, got {scales[~usable].ravel()[0]}")
    return scales


def dequantise(scaled: BlockScaled) -> np.ndarray:
    """Return a weight (N, K) in float32, each element times its block's scale: the numbers that `bmm` multiplies by.

    >>> weight = np.ones((3, 2), FLOAT8_E4M3FN)
    >>> dequantise(BlockScaled(weight, np.float32([[1.0], [4.0]]), (2, 2))).tolist()
    [[1.0, 1.0], [1.0, 1.0], [4.0, 4.0]]
    """
    weight, scale, block_size = scaled
    rows, columns = weight.shape
    bn, bk = min(block_size[0], rows), min(block_size[1], columns)
    return weight.astype(np.float32) * scale.repeat(bn, axis=0)[:rows].repeat(bk, axis=1)[:, :columns]


def block_quant_to_tensor_quant(weight, weight_scale, block_size):
    """Requantise an fp8 weight with a scale for each block to one scale for all of it.

    ``x = float32(weight) * block's scale``, ``amax = max(|x|, 1e-12)``,
    ``out = e4m3fn(clip(x * (448 / amax), -448, 448))``, ``scale = amax / 448``, in float32.

    Parameters
    ----------
    weight : ndarray (N, K)
        float8_e4m3fn.
    weight_scale : ndarray (ceil(N / bn), ceil(K / bk))
        One for each block: float32, float16 or bfloat16.
    block_size : tuple of int
        (bn, bk).

    Returns
    -------
    out : ndarray (N, K)
        float8_e4m3fn.
    scale : float32
        value = out * scale.

    Raises
    ------
    TypeError, ValueError
        An argument other than the above, scales that are not finite and positive, or a weight that holds NaN.

    Notes
    -----
    Lossy where blocks have very different ranges: a layer keeps block scales instead, unless told to.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, numba_mla
    >>> ones = np.ones((2, 2), ml_dtypes.float8_e4m3fn)
    >>> out, scale = numba_mla.block_quant_to_tensor_quant(ones, np.float32([[1.0, 4.0]]), (2, 1))
    >>> (out.astype(np.float32) * scale).round(2).tolist()
    [[1.0, 4.0], [1.0, 4.0]]
    """
    check_array("weight", weight, ("N", "K"), (FLOAT8_E4M3FN,))
    bn, bk = check_block_size(block_size)
    rows, columns = weight.shape
    scales = check_block_scales("weight_scale", weight_scale, (-(-rows // bn), -(-columns // bk)))
    x = dequantise(BlockScaled(weight, scales, (bn, bk)))
    if np.isnan(x).any():
        raise ValueError("weight: expected numbers, got NaN")
    largest = np.maximum(np.abs(x).max(initial=0), np.float32(1e-12))
    limit = np.float32(448)
    return np.clip(x * (limit / largest), -limit, limit).astype(FLOAT8_E4M3FN), np.float32(largest / limit)
