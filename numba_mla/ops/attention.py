"""``decode`` and ``extend``: absorbed attention over the paged latent cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..checks import address, check_array, check_count, check_flag, check_integers, check_scale, dense_rows, describe
from ..kernels.problem import Problem
from ..runtime import context_for
from .elements import CODES
from .launch import prepare_outputs, run_attention
from .pages import check_block_table, check_pages, check_row_dtype


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
    kv_cache : ndarray (num_blocks, block_size, Dc + Dr), or uint8 (num_blocks, block_size, 656)
        The paged cache, rows ``[latent | rotated key]``: of q's dtype, float8_e4m3fn, float8_e5m2, or in
        FlashMLA's layout of 656 bytes (512 e4m3fn, 4 float32 scales, 64 bfloat16).
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
        Of an fp8 cache: value = stored * cache_scale, finite and positive; None: 1. The layout of 656 bytes
        has scales of its own.
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
    kv_cache : ndarray (num_blocks, block_size, Dc + Dr), or uint8 (num_blocks, block_size, 656)
        The paged cache, as ``decode`` takes it; the new tokens' rows are already in it.
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
        Of an fp8 cache: value = stored * cache_scale, finite and positive; None: 1. The layout of 656 bytes
        has scales of its own.
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
    starts = check_start_locations("query_start_loc", query_start_loc, len(queries.latent), "q")
    causal = check_flag("causal", causal)
    lengths = check_integers("seq_lens", seq_lens, (len(starts) - 1,))
    if check_flag("validate", validate):
        short = np.flatnonzero((lengths < np.diff(starts)) & (np.diff(starts) > 0))
        if len(short):
            r = int(short[0])
            raise ValueError(
                f"seq_lens: expected the new tokens to be counted, got seq_len {lengths[r]} with "
                f"{starts[r + 1] - starts[r]} new tokens in request {r}"
            )
    return _attend(queries, kv_cache, block_table, lengths, starts, scale, cache_scale, causal, out, lse, isa,
                   validate)  # fmt: skip


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


def check_start_locations(name: str, starts, num_tokens: int, owner: str) -> np.ndarray:
    """Start locations, (B + 1,), that run from 0 to all tokens without falling."""
    starts = check_integers(name, starts, ("B + 1",))
    if len(starts) < 1 or starts[0] != 0 or starts[-1] != num_tokens or (np.diff(starts) < 0).any():
        raise ValueError(
            f"{name}: expected to run from 0 to {num_tokens} (the tokens of {owner}) without falling, got "
            f"{np.array2string(starts, threshold=12, separator=', ')}"
        )
    return starts


def _attend(queries: _Queries, kv_cache, block_table, lengths, starts, scale, cache_scale, causal, out, lse, isa,
            validate):  # fmt: skip
    """Check the rest, and run."""
    latent, rotary = queries
    pages = check_pages(kv_cache, latent.shape[2], latent.shape[2] + rotary.shape[2], cache_scale)
    check_row_dtype("q", latent, pages)
    scale = check_scale("scale", scale)
    table = check_block_table(block_table, pages, lengths, validate)
    outputs = prepare_outputs(out, lse, latent.shape, latent.dtype,
                              {"q_latent": latent, "q_pe": rotary, "kv_cache": kv_cache})  # fmt: skip
    problem = Problem(
        address(latent), latent.strides[0], latent.strides[1], address(rotary), rotary.strides[0], rotary.strides[1],
        q_split=latent.shape[2], q_element=CODES[latent.dtype],
        num_heads=latent.shape[1], group_heads=latent.shape[1],
        keys=pages.address, key_page_stride=pages.page_stride, key_row_stride=pages.row_stride, key_head_stride=0,
        values=0, value_page_stride=0, value_row_stride=0, value_head_stride=0,
        row_element=pages.element, block_size=pages.block_size, width=pages.width, value_width=latent.shape[2],
        causal=int(causal), **outputs.fields(),
    )  # fmt: skip
    # The cache's scale multiplies every score and every value: once a score's factor and once the result's.
    run_attention(problem, scale * pages.scale, pages.scale, lengths, starts, table,
                  context_for(isa, pages.arithmetic(latent.dtype)))  # fmt: skip
    return outputs.deliver()
