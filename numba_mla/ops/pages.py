"""Checks of a paged cache and its block table, shared by all operations that read or write one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..checks import (
    BFLOAT16,
    FLOAT_DTYPES,
    MAX_POSITIONS,
    address,
    check_array,
    check_flag,
    check_integers,
    check_scale,
    describe,
    names,
)
from ..kernels.paging import find_bad_page
from ..kernels.rows import FP8_DS_MLA
from ..quant import DS_BYTES, DS_LATENT, DS_ROTARY, FLOAT8_DTYPES, is_ds_layout, is_fp8, row_width
from .elements import CODES

_BYTES = np.dtype(np.uint8)


class Pages(NamedTuple):
    """A checked paged cache, as kernels see it: strides in bytes, ``element`` the code of its rows' layout."""

    array: np.ndarray
    address: int
    page_stride: int
    row_stride: int
    block_size: int
    width: int
    element: int
    scale: float

    @property
    def float_dtype(self) -> np.dtype | None:
        """The element type of a cache that is not quantised; None for fp8 and 656-byte rows."""
        return self.array.dtype if self.array.dtype in FLOAT_DTYPES else None


def check_pages(kv_cache, kv_lora_rank: int, width: int | None, cache_scale) -> Pages:
    """A paged cache whose rows' elements lie side by side, with rows of ``width`` values (None: any)."""
    check_array("kv_cache", kv_cache, ("num_blocks", "block_size", "Dc + Dr"), (*FLOAT_DTYPES, *FLOAT8_DTYPES, _BYTES))
    if kv_cache.dtype == _BYTES and not is_ds_layout(kv_cache):
        raise ValueError(f"kv_cache: expected rows of {DS_BYTES} bytes in a uint8 cache, got {describe(kv_cache)}")
    found = row_width(kv_cache)
    if width is not None and found != width:
        raise ValueError(
            f"kv_cache: expected rows of {width} values, the width of the queries (Dc + Dr), got {found} in a "
            f"{describe(kv_cache)}"
        )
    if found < kv_lora_rank:
        raise ValueError(f"kv_cache: expected rows of at least Dc = {kv_lora_rank} values, got {describe(kv_cache)}")
    if is_ds_layout(kv_cache) and kv_lora_rank != DS_LATENT:
        raise ValueError(
            f"kv_lora_rank: expected {DS_LATENT} with rows of {DS_BYTES} bytes ({DS_LATENT} + {DS_ROTARY} values), "
            f"got {kv_lora_rank}"
        )
    if kv_cache.shape[1] == 0:
        raise ValueError(f"kv_cache: expected a block_size of at least 1, got {describe(kv_cache)}")
    if kv_cache.strides[2] != kv_cache.itemsize and kv_cache.shape[2] > 1:
        raise ValueError(
            f"kv_cache: expected the elements of a row side by side, got a last axis with stride "
            f"{kv_cache.strides[2]} bytes ({describe(kv_cache)})"
        )
    scale = 1.0
    if cache_scale is not None:
        if not is_fp8(kv_cache.dtype):
            raise ValueError(
                f"cache_scale: expected None with {describe(kv_cache)} ({names(FLOAT8_DTYPES)} caches have one), "
                f"got {describe(cache_scale)}"
            )
        scale = check_scale("cache_scale", cache_scale)
    element = FP8_DS_MLA if is_ds_layout(kv_cache) else CODES[kv_cache.dtype]
    return Pages(kv_cache, address(kv_cache), kv_cache.strides[0], kv_cache.strides[1], kv_cache.shape[1], found,
                 element, scale)  # fmt: skip


def check_row_dtype(name: str, x: np.ndarray, pages: Pages) -> None:
    """An array that goes with a cache: of its type, or of any float type if the cache is quantised."""
    if pages.float_dtype is not None and x.dtype != pages.float_dtype:
        cast = "ml_dtypes.bfloat16" if pages.float_dtype == BFLOAT16 else f"np.{pages.float_dtype}"
        raise TypeError(
            f"{name}: expected the cache's dtype {pages.float_dtype}, got {x.dtype} array; "
            f"cast it: {name}.astype({cast})"
        )


def gathered_dtype(pages: Pages) -> np.dtype:
    """What a cache's rows are gathered to by default: their own type, bfloat16 where they are quantised."""
    return pages.float_dtype or BFLOAT16


def read_block_table(block_table, num_requests: int) -> np.ndarray:
    """The block table as int64 (B, M), its entries not yet checked."""
    if block_table is None:
        return np.arange(num_requests).reshape(num_requests, 1)
    return check_integers("block_table", block_table, (num_requests, "M"))


def check_used_pages(table: np.ndarray, kv_cache: np.ndarray, lengths: np.ndarray) -> None:
    """Lengths that the table has room for, and used pages inside the cache."""
    num_blocks, block_size = kv_cache.shape[:2]
    longest = min(table.shape[1] * block_size, MAX_POSITIONS)
    bad = np.flatnonzero((lengths < 0) | (lengths > longest))
    if len(bad):
        r = int(bad[0])
        raise ValueError(
            f"seq_lens: expected 0 to {longest} (block_table of shape {table.shape} with pages of {block_size}), "
            f"got {lengths[r]} in request {r}"
        )
    request, page = find_bad_page(table, lengths, block_size, num_blocks)
    if request >= 0:
        raise ValueError(
            f"block_table: expected used pages within the cache's 0 to {num_blocks - 1} (kv_cache of shape "
            f"{kv_cache.shape}), got {table[request, page]} at [{request}, {page}]"
        )


def check_block_table(block_table, pages: Pages, lengths: np.ndarray, validate: bool) -> np.ndarray:
    """The block table as int64 (B, M), its used pages inside the cache."""
    table = read_block_table(block_table, len(lengths))
    if check_flag("validate", validate):
        check_used_pages(table, pages.array, lengths)
    return table
