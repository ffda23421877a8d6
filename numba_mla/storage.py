"""Memory of a cache's rows: their formats, arrays and files that hold them, saved copies of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .checks import BFLOAT16, FLOAT_DTYPES, check_array, check_scale, names
from .memory import aligned_zeros
from .quant import DS_BYTES, DS_LATENT, DS_ROTARY, FLOAT8_DTYPES
from .safetensors_file import CheckpointError, SafetensorsFile, save_whole

DS_LAYOUT = "fp8_ds_mla"
UINT8 = np.dtype(np.uint8)
SAVED_AS = "numba_mla.PagedLatentCache/1"

Rows = np.ndarray | str | Path | None


def row_format(
    kv_lora_rank: int, qk_rope_head_dim: int, dtype: Any, layout: str | None, cache_scale: float | None
) -> tuple[np.dtype, int]:
    """Return the element type of rows and how many elements a row has, or say what does not fit.

    Examples
    --------
    >>> row_format(512, 64, BFLOAT16, None, None), row_format(512, 64, BFLOAT16, "fp8_ds_mla", None)
    ((dtype(bfloat16), 576), (dtype('uint8'), 656))
    """
    stored_dtypes = (*FLOAT_DTYPES, *FLOAT8_DTYPES)
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype: expected {names(stored_dtypes)}, got {dtype!r}") from None
    if layout is None:
        if dtype not in stored_dtypes:
            raise TypeError(f"dtype: expected {names(stored_dtypes)}, got {dtype}")
        if cache_scale is not None:
            if dtype not in FLOAT8_DTYPES:
                raise ValueError(f"cache_scale: expected None with a {dtype} cache, got {cache_scale!r}")
            check_scale("cache_scale", cache_scale)
        return dtype, kv_lora_rank + qk_rope_head_dim
    if layout != DS_LAYOUT:
        raise ValueError(f"layout: expected None (rows of dtype) or {DS_LAYOUT!r}, got {layout!r}")
    if dtype not in (BFLOAT16, UINT8):
        raise TypeError(f"dtype: expected none beside layout {DS_LAYOUT!r}, whose rows are bytes, got {dtype}")
    if (kv_lora_rank, qk_rope_head_dim) != (DS_LATENT, DS_ROTARY):
        raise ValueError(
            f"layout: {DS_LAYOUT!r} needs kv_lora_rank {DS_LATENT} and qk_rope_head_dim {DS_ROTARY}, "
            f"got {kv_lora_rank} and {qk_rope_head_dim}"
        )
    if cache_scale is not None:
        raise ValueError(f"cache_scale: expected None with layout {DS_LAYOUT!r}, whose rows have scales of their own")
    return UINT8, DS_BYTES


def open_rows(storage: Rows, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return memory of this shape and element type: zeros, the given array, or a file mapped to be written.

    A file that is there keeps its bytes and must have just the right number of them.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes > np.iinfo(np.intp).max:
        raise ValueError(f"num_layers, num_blocks, block_size: expected rows that memory can hold, got {shape[:3]}")
    if storage is None:
        return aligned_zeros(shape, dtype)
    if isinstance(storage, (str, Path)):
        path = Path(storage)
        if path.exists() and path.stat().st_size != size_bytes:
            raise ValueError(f"storage: {path}: expected a file of {size_bytes} bytes, it has {path.stat().st_size}")
        return np.memmap(path, dtype, mode="r+" if path.exists() else "w+", shape=shape)
    check_array("storage", storage, shape, (dtype,))
    if not (storage.flags.c_contiguous and storage.flags.writeable):
        raise ValueError("storage: expected a writable C-contiguous array")
    return storage


def save_rows(path: Path, rows: np.ndarray, num_pages: int, state: Mapping[str, Any]) -> None:
    """Write the first pages of every layer and a state of plain numbers, names and lists, all or nothing."""
    text = json.dumps(state, default=lambda number: number.item()).encode()
    tensors = {"state": np.frombuffer(text, np.uint8)}
    # A tensor per layer, so that each is contiguous where it lies and nothing is copied.
    tensors |= {f"rows.{layer}": of_layer[:num_pages] for layer, of_layer in enumerate(rows)}
    save_whole(tensors, path, {"format": SAVED_AS})


def load_rows(path: Path) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return what `save_rows` wrote, the rows of each layer mapped and not read.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    CheckpointError
        The file is cut short, damaged, or something else.
    """
    file = SafetensorsFile(path)
    if file.metadata.get("format") != SAVED_AS:
        raise CheckpointError(f"{path}: not a saved cache: its format is {file.metadata.get('format')!r}")
    try:
        state = json.loads(file.tensor("state").tobytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: tensor state: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: tensor state: expected an object, got {type(state).__name__}")
    return [file.tensor(f"rows.{layer}") for layer in range(len(file.names) - 1)], state
