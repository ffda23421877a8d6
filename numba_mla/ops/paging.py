"""``gather_cache`` and ``expand_block_table``: rows and slots of the paged cache."""

from __future__ import annotations

import numpy as np

from ..checks import FLOAT_DTYPES, address, check_count, check_integers, check_output, describe
from ..kernels.paging import gather_rows
from ..runtime import context_for, workspace
from .elements import CODES
from .pages import Pages, check_block_table, check_pages, gathered_dtype


def gather_cache(kv_cache, block_table, seq_lens, *, starts=None, kv_lora_rank=512, cache_scale=None, dtype=None,
                 out=None, validate=True):  # fmt: skip
    """Gather cached rows of several requests, position by position, into contiguous arrays.

    Row ``kv_start_loc[b] + p - starts[b]`` of the result is position p of request b,
    ``starts[b] <= p < seq_lens[b]``.

    Parameters
    ----------
    kv_cache : ndarray (num_blocks, block_size, Dc + Dr), or uint8 (num_blocks, block_size, 656)
        The paged cache, in any layout that ``write_cache`` writes.
    block_table : int array (B, M), or None
        Pages of each request, in order; None: page b is request b.
    seq_lens : int array or list (B,)
        One past the last position to gather of each request.
    starts : int array or list (B,), optional
        First position to gather of each request; None: 0.
    kv_lora_rank : int
        Dc, where a row is cut into its two parts.
    cache_scale : float, optional
        Of an fp8 cache: value = stored * cache_scale; None: 1.
    dtype : dtype, optional
        Of the result: float32, float16 or bfloat16; None: the cache's, or bfloat16 for a quantised cache.
    out : pair of ndarray (>= n, Dc) and (>= n, Dr), optional
        Where to write the rows, n in all; rows past n are left alone.
    validate : bool
        False skips the checks of pages' and positions' values.

    Returns
    -------
    kv_c : ndarray (n, Dc)
    k_pe : ndarray (n, Dr)
    kv_start_loc : ndarray (B + 1,)
        int64, where each request's rows begin.

    Raises
    ------
    TypeError, ValueError
        An argument other than the above; the message names it.

    Notes
    -----
    Exact where the result's dtype holds the cache's values, else rounded once to nearest even. A row of 656 bytes
    holds bfloat16 values: code * scale, a float32 product, rounded once.

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> cache = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    >>> kv_c, k_pe, kv_start_loc = numba_mla.gather_cache(cache, [[1, 0]], [3], starts=[1], kv_lora_rank=2)
    >>> kv_c.tolist(), k_pe.tolist(), kv_start_loc.tolist()
    ([[9.0, 10.0], [0.0, 1.0]], [[11.0], [2.0]], [0, 2])
    """
    rank = check_count("kv_lora_rank", kv_lora_rank, 1)
    pages = check_pages(kv_cache, rank, None, cache_scale)
    ends = check_integers("seq_lens", seq_lens, ("B",))
    first = np.zeros(len(ends), np.int64) if starts is None else check_integers("starts", starts, (len(ends),))
    table = check_block_table(block_table, pages, ends, validate)
    if ((first < 0) | (first > ends)).any():
        r = int(np.flatnonzero((first < 0) | (first > ends))[0])
        raise ValueError(f"starts: expected 0 to seq_lens[{r}] = {ends[r]}, got {first[r]} in request {r}")
    kv_start_loc = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - first)])
    parts = _gather_targets(out, int(kv_start_loc[-1]), rank, _check_dtype(dtype, gathered_dtype(pages)), pages)
    dense = [x if x.strides[1] == x.itemsize or x.shape[1] <= 1 else np.empty(x.shape, x.dtype) for x in parts]
    scratch = workspace.reserve(4 * pages.width)
    gather_rows(
        context_for(), pages.address, pages.page_stride, pages.row_stride, pages.block_size, table, first, ends,
        pages.width, pages.element, kv_cache.itemsize, pages.scale, address(dense[0]), dense[0].strides[0], rank,
        address(dense[1]), dense[1].strides[0], CODES[dense[0].dtype], scratch.address,
    )  # fmt: skip
    for part, written in zip(parts, dense, strict=True):
        if written is not part:
            part[...] = written
    return parts[0], parts[1], kv_start_loc


def expand_block_table(block_table, block_size):
    """The slot of every position: ``slots[b, m * block_size + o] = block_table[b, m] * block_size + o``.

    Parameters
    ----------
    block_table : int array (B, M)
        Pages of each request; -1 says that there is none.
    block_size : int
        Rows of a page.

    Returns
    -------
    slots : ndarray (B, M * block_size)
        Of block_table's dtype (int64 for lists); -1 stays -1.

    Raises
    ------
    TypeError, ValueError
        An argument other than the above, a page below -1, or slots that its dtype does not hold.

    Examples
    --------
    >>> import numba_mla
    >>> numba_mla.expand_block_table([[2, -1]], 2).tolist()
    [[4, 5, -1, -1]]
    """
    rows = check_count("block_size", block_size, 1)
    table = check_integers("block_table", block_table, ("B", "M"))
    dtype = block_table.dtype if isinstance(block_table, np.ndarray) else table.dtype
    if table.size and table.min() < -1:
        raise ValueError(f"block_table: expected pages of at least -1, got {table.min()}")
    largest = np.iinfo(dtype).max
    highest = int(table.max(initial=0))
    if (highest + 1) * rows - 1 > largest:
        raise ValueError(
            f"block_table: expected slots within {dtype} (at most {largest}), got page {highest} with "
            f"block_size {rows}; pass int64"
        )
    if table.size == 0:
        return np.empty((len(table), table.shape[1] * rows), dtype)
    pages = table.astype(dtype)[:, :, None]
    slots = np.where(pages < 0, pages, pages * dtype.type(rows) + np.arange(rows, dtype=dtype))
    return slots.reshape(len(table), table.shape[1] * rows)


def _check_dtype(dtype, default: np.dtype) -> np.dtype:
    if dtype is None:
        return default
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {describe(dtype)}") from None
    if wanted not in FLOAT_DTYPES:
        raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {wanted}")
    return wanted


def _gather_targets(out, num_rows: int, rank: int, dtype: np.dtype, pages: Pages):
    """The two arrays to gather to, cut to the rows that there are."""
    widths = (rank, pages.width - rank)
    if out is None:
        return tuple(np.empty((num_rows, width), dtype) for width in widths)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"out: expected the pair (kv_c, k_pe) of arrays, got {describe(out)}")
    inputs = {"kv_cache": pages.array}
    for name, part, width in zip(("kv_c", "k_pe"), out, widths, strict=True):
        check_output("out", part, (f">= {num_rows}", width), (dtype,), inputs)
        inputs |= {f"its {name}": part}
        if len(part) < num_rows:
            raise ValueError(f"out: expected at least {num_rows} rows, got {describe(part)}")
    return tuple(part[:num_rows] for part in out)
