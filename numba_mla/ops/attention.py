"""``decode`` and ``extend``: absorbed attention over the paged latent cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..checks import (
    Shape,
    address,
    check_array,
    check_count,
    check_integers,
    check_output,
    check_scale,
    dense_rows,
    describe,
)
from ..kernels.attention import attention_parallel, attention_serial
from ..kernels.context import ELEMENT_CODES, LANE_GROUP
from ..kernels.paging import find_bad_page
from ..kernels.problem import Problem
from ..kernels.schedule import plan_attention
from ..kernels.scratch import workspace_bytes
from ..runtime import context_for, workspace
from ..threads import launching, num_threads

FLOAT32 = np.dtype(np.float32)


class _Queries(NamedTuple):
    """Checked queries: the latent and the rotary part, which may be views of one array."""

    latent: np.ndarray
    rotary: np.ndarray


def decode(q, kv_cache, block_table, seq_lens, *, scale, kv_lora_rank=512, cache_scale=None, out=None, lse=None,
           isa=None, validate=True):  # fmt: skip
    """Attention of one new token a request over its latent cache (absorbed MLA).

    ``out[b, h] = sum_s p[s] row[s, :Dc] / sum_s p[s]``, ``p[s] = exp(scale * (q[b, h] . row[s]))``,
    ``lse[b, h] = ln sum_s p[s]``, over the ``seq_lens[b]`` cached rows of request b.

    Parameters
    ----------
    q : ndarray (B, H, Dc + Dr), or pair of ndarray (B, H, Dc) and (B, H, Dr)
        Absorbed queries, float32, float16 or bfloat16: ``[q_nope @ W_UK | q_pe]``.
    kv_cache : ndarray (num_blocks, block_size, Dc + Dr)
        The paged cache, of q's dtype: rows ``[latent | rotated key]``.
    block_table : int array (B, M), or None
        Pages of each request, in order; None: page b is request b. Entries past the last used page are
        never looked at.
    seq_lens : int array or list (B,)
        Cached tokens of each request, the new one included; 0 gives a row of zeros and lse -inf.
    scale : float
        Factor on the scores, finite and positive: 1 / sqrt(Dn + Dr) (and YaRN's factor), not of Dc + Dr.
    kv_lora_rank : int
        Dc, the latent width.
    cache_scale : float, optional
        For fp8 caches, which this version does not read: must be None.
    out : ndarray (B, H, Dc), optional
        Where to write the result: of q's dtype, or float32.
    lse : ndarray (B, H), optional
        Where to write the log-sum-exp, float32.
    isa : str, optional
        The instruction set to use, one of ``available_isas()``.
    validate : bool
        False skips the checks of index values (pages, lengths), not those of shapes and types.

    Returns
    -------
    out : ndarray (B, H, Dc)
    lse : ndarray (B, H)
        float32, natural logarithm.

    Raises
    ------
    TypeError, ValueError
        Before any kernel runs, naming the argument, what was expected and what came.

    Notes
    -----
    float32 accumulation; the same bits for any thread count, batch, page size and page order, and the same
    as ``extend`` gives. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; the online softmax of
    FlashAttention (arXiv:2205.14135).

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> cache = np.ones((2, 4, 6), np.float32)
    >>> q = np.zeros((1, 3, 6), np.float32)
    >>> out, lse = numba_mla.decode(q, cache, [[1, 0]], [5], scale=0.5, kv_lora_rank=4)
    >>> out.shape, float(np.exp(lse[0, 0]).round(3))
    ((1, 3, 4), 5.0)
    """
    queries = _check_queries(q, "B", kv_lora_rank)
    num_requests = len(queries.latent)
    lengths = check_integers("seq_lens", seq_lens, (num_requests,))
    starts = np.arange(num_requests + 1)
    return _attend(queries, kv_cache, block_table, lengths, starts, scale, cache_scale, False, out, lse, isa, validate)


def extend(q, kv_cache, block_table, seq_lens, query_start_loc, *, scale, kv_lora_rank=512, cache_scale=None,
           causal=True, out=None, lse=None, isa=None, validate=True):  # fmt: skip
    """Attention of several new tokens a request over its latent cache, the new tokens included.

    As ``decode``, for token i of a request's n new ones over its first ``seq_len - n + i + 1`` rows (causal,
    aligned bottom-right) or all ``seq_len`` rows (``causal=False``).

    Parameters
    ----------
    q : ndarray (T, H, Dc + Dr), or pair of ndarray (T, H, Dc) and (T, H, Dr)
        Absorbed queries of all requests' new tokens, one request after the other.
    kv_cache : ndarray (num_blocks, block_size, Dc + Dr)
        The paged cache, of q's dtype; the new tokens' rows are already in it.
    block_table : int array (B, M), or None
        Pages of each request, in order; None: page b is request b.
    seq_lens : int array or list (B,)
        Cached tokens of each request, the new ones counted.
    query_start_loc : int array or list (B + 1,)
        Where each request's tokens begin in q, from 0 to T.
    scale : float
        Factor on the scores, finite and positive.
    kv_lora_rank : int
        Dc, the latent width.
    cache_scale : float, optional
        For fp8 caches, which this version does not read: must be None.
    causal : bool
        Whether a token sees only itself and what came before it.
    out : ndarray (T, H, Dc), optional
        Where to write the result: of q's dtype, or float32.
    lse : ndarray (T, H), optional
        Where to write the log-sum-exp, float32.
    isa : str, optional
        The instruction set to use, one of ``available_isas()``.
    validate : bool
        False skips the checks of index values (pages, lengths), not those of shapes and types.

    Returns
    -------
    out : ndarray (T, H, Dc)
    lse : ndarray (T, H)
        float32, natural logarithm.

    Raises
    ------
    TypeError, ValueError
        Before any kernel runs, naming the argument, what was expected and what came.

    Notes
    -----
    One extend of n tokens gives the bits of n decodes, and of any chunks. A row that a token does not see
    adds nothing to it, whatever it holds (NaN and inf included). Source: as ``decode``.

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> cache = np.ones((1, 8, 6), np.float32)
    >>> q = np.zeros((3, 2, 6), np.float32)
    >>> out, lse = numba_mla.extend(q, cache, [[0]], [5], [0, 3], scale=0.5, kv_lora_rank=4)
    >>> np.exp(lse[:, 0]).round(3).tolist()
    [3.0, 4.0, 5.0]
    """
    queries = _check_queries(q, "T", kv_lora_rank)
    starts = check_integers("query_start_loc", query_start_loc, ("B + 1",))
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal: expected True or False, got {describe(causal)}")
    if len(starts) < 1 or starts[0] != 0 or starts[-1] != len(queries.latent) or (np.diff(starts) < 0).any():
        raise ValueError(
            f"query_start_loc: expected to run from 0 to {len(queries.latent)} (the tokens of q) without falling, "
            f"got {_excerpt(starts)}"
        )
    lengths = check_integers("seq_lens", seq_lens, (len(starts) - 1,))
    if validate:
        short = np.flatnonzero((lengths < np.diff(starts)) & (np.diff(starts) > 0))
        if len(short):
            r = int(short[0])
            raise ValueError(
                f"seq_lens: expected the new tokens to be counted, got seq_len {lengths[r]} with "
                f"{starts[r + 1] - starts[r]} new tokens in request {r}"
            )
    return _attend(queries, kv_cache, block_table, lengths, starts, scale, cache_scale, bool(causal), out, lse, isa,
                   validate)  # fmt: skip


def _excerpt(values: np.ndarray) -> str:
    return np.array2string(values, threshold=12, separator=", ")


def _check_queries(q, tokens: str, kv_lora_rank: int) -> _Queries:
    """The two parts of the queries, elements of a row side by side."""
    rank = check_count("kv_lora_rank", kv_lora_rank, 1)
    if isinstance(q, (tuple, list)):
        if len(q) != 2:
            raise ValueError(f"q: expected one array or the pair (q_latent, q_pe), got {len(q)} items")
        latent = check_array("q_latent", q[0], (tokens, "H", rank))
        rotary = check_array("q_pe", q[1], (*latent.shape[:2], "Dr"), (latent.dtype,))
        latent, rotary = dense_rows(latent), dense_rows(rotary)
    else:
        whole = dense_rows(check_array("q", q, (tokens, "H", "Dc + Dr")))
        if whole.shape[2] < rank:
            raise ValueError(f"q: expected a width of at least kv_lora_rank = {rank}, got {describe(whole)}")
        latent, rotary = whole[..., :rank], whole[..., rank:]
    if latent.shape[1] == 0:
        raise ValueError(f"q: expected at least one head, got {describe(latent)}")
    return _Queries(latent, rotary)


def check_pages(kv_cache, shape: Shape, cache_scale) -> np.ndarray:
    """A paged cache of the given shape whose rows' elements lie side by side."""
    check_array("kv_cache", kv_cache, shape)
    if cache_scale is not None:
        raise ValueError(f"cache_scale: expected None with a {kv_cache.dtype} cache, got {describe(cache_scale)}")
    if kv_cache.shape[1] == 0:
        raise ValueError(f"kv_cache: expected a block_size of at least 1, got {describe(kv_cache)}")
    if kv_cache.strides[2] != kv_cache.itemsize and kv_cache.shape[2] > 1:
        raise ValueError(
            f"kv_cache: expected the elements of a row side by side, got a last axis with stride "
            f"{kv_cache.strides[2]} bytes ({describe(kv_cache)})"
        )
    return kv_cache


def check_block_table(block_table, kv_cache: np.ndarray, lengths: np.ndarray, validate: bool) -> np.ndarray:
    """The block table as int64 (B, M), its used pages inside the cache."""
    num_requests = len(lengths)
    num_blocks, block_size = kv_cache.shape[:2]
    if block_table is None:
        table = np.arange(num_requests).reshape(num_requests, 1)
    else:
        table = check_integers("block_table", block_table, (num_requests, "M"))
    if not validate or num_requests == 0:
        return table
    if (lengths < 0).any() or (lengths > table.shape[1] * block_size).any():
        r = int(np.flatnonzero((lengths < 0) | (lengths > table.shape[1] * block_size))[0])
        raise ValueError(
            f"seq_lens: expected 0 to {table.shape[1] * block_size} (block_table of shape {table.shape} with pages "
            f"of {block_size}), got {lengths[r]} in request {r}"
        )
    request, page = find_bad_page(table, lengths, block_size, num_blocks)
    if request >= 0:
        raise ValueError(
            f"block_table: expected used pages within the cache's 0 to {num_blocks - 1} (kv_cache of shape "
            f"{kv_cache.shape}), got {table[request, page]} at [{request}, {page}]"
        )
    return table


def _attend(queries: _Queries, kv_cache, block_table, lengths, starts, scale, cache_scale, causal, out, lse, isa,
            validate):  # fmt: skip
    """Check the rest, plan, and run the plan's items on the threads in force."""
    latent, rotary = queries
    check_pages(kv_cache, ("num_blocks", "block_size", latent.shape[2] + rotary.shape[2]), cache_scale)
    if kv_cache.dtype != latent.dtype:
        raise TypeError(f"kv_cache: expected q's dtype {latent.dtype}, got {describe(kv_cache)}")
    scale = check_scale("scale", scale)
    table = check_block_table(block_table, kv_cache, lengths, validate)
    inputs = {"q_latent": latent, "q_pe": rotary, "kv_cache": kv_cache}
    if out is None:
        out = np.empty(latent.shape, latent.dtype)
    target = check_output("out", out, latent.shape, (latent.dtype, FLOAT32), inputs)
    if lse is None:
        lse = np.empty(latent.shape[:2], np.float32)
    check_output("lse", lse, latent.shape[:2], (FLOAT32,), inputs | {"out": out})
    if target.strides[2] != target.itemsize and target.shape[2] > 1:
        target = np.empty(target.shape, target.dtype)
    problem = Problem(
        address(latent), latent.strides[0], latent.strides[1], address(rotary), rotary.strides[0], rotary.strides[1],
        q_split=latent.shape[2], q_element=ELEMENT_CODES[latent.dtype.name], num_heads=latent.shape[1],
        keys=address(kv_cache), page_stride=kv_cache.strides[0], row_stride=kv_cache.strides[1],
        key_element=ELEMENT_CODES[kv_cache.dtype.name], block_size=kv_cache.shape[1],
        width=kv_cache.shape[2], value_width=latent.shape[2], causal=int(causal),
        out=address(target), out_token_stride=target.strides[0], out_head_stride=target.strides[1],
        out_element=ELEMENT_CODES[target.dtype.name],
        lse=address(lse), lse_token_stride=lse.strides[0], lse_head_stride=lse.strides[1],
    )  # fmt: skip
    _run(problem, scale, lengths, starts, table, isa)
    if target is not out:
        out[...] = target
    return out, lse


def _run(problem: Problem, scale: float, lengths: np.ndarray, starts: np.ndarray, table: np.ndarray, isa) -> None:
    context = context_for(isa)
    packed = problem.packed()
    workers = num_threads()
    items, groups, num_slots, longest_run = plan_attention(
        lengths, starts, problem.num_heads, int(context[LANE_GROUP]), problem.causal, workers
    )
    workers = min(workers, len(items))
    if workers == 0:
        return
    memory = workspace.reserve(workspace_bytes(context, packed, longest_run, num_slots, workers))
    arguments = (context, packed, scale, lengths, starts, table, items, groups, longest_run, np.zeros(1, np.int64),
                 memory, workers)  # fmt: skip
    if workers == 1:
        attention_serial(*arguments)
        return
    with launching():
        attention_parallel(*arguments)
