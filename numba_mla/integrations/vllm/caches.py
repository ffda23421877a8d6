"""vLLM's kinds of latent cache: their names, and how their memory looks to this package."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from ..torch import as_array, as_dtype

PACKED_ROWS = "fp8_ds_mla"
# The widths that rows of 656 bytes are made for.
PACKED_WIDTHS = (512, 64)
_FP8 = {
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_cache(kv_cache_dtype: str, model_dtype: torch.dtype, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    """Refuse a cache that no kernel reads.

    Raises
    ------
    ValueError
        The kind of cache, or the model's widths with it; the message names it.
    """
    known = ("auto", *_HALF, *_FP8, PACKED_ROWS)
    if kv_cache_dtype not in known:
        raise ValueError(f"kv_cache_dtype: numba_mla expects one of {', '.join(known)}, got {kv_cache_dtype!r}")
    if kv_cache_dtype in _HALF and model_dtype not in (_HALF[kv_cache_dtype], torch.float32):
        raise ValueError(
            f"kv_cache_dtype: numba_mla expects {kv_cache_dtype} with a model of that type or float32, "
            f"got {kv_cache_dtype!r} with {model_dtype}"
        )
    widths = (kv_lora_rank, qk_rope_head_dim)
    if kv_cache_dtype == PACKED_ROWS and widths != PACKED_WIDTHS:
        raise ValueError(
            f"kv_cache_dtype: {PACKED_ROWS} has rows for kv_lora_rank, qk_rope_head_dim = {PACKED_WIDTHS}, "
            f"this model's are {widths}"
        )


def cache_array(kv_cache: torch.Tensor, kv_cache_dtype: str) -> np.ndarray:
    """Return a layer's cache (num_blocks, block_size, width) as this package takes it.

    vLLM hands fp8 caches out as bytes, or as e4m3 whatever they hold.
    """
    if kv_cache_dtype in _FP8:
        return as_array(kv_cache.view(torch.uint8)).view(_FP8[kv_cache_dtype])
    return as_array(kv_cache)


def cache_scale(kv_cache_dtype: str, scale: torch.Tensor) -> float | None:
    """Return the factor on what a cache holds; None where it has none."""
    return float(scale) if kv_cache_dtype in _FP8 else None


def row_dtype(kv_cache: np.ndarray, model_dtype: torch.dtype) -> np.dtype:
    """Return the type in which new rows are handed over: the cache's, or what it is quantised from."""
    return kv_cache.dtype if kv_cache.dtype.name in ("float32", *_HALF) else as_dtype(model_dtype)
