"""``decode`` and ``extend``: absorbed attention over the paged latent cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..checks import check_array, check_count, check_flag, check_integers, check_scale, dense_rows, describe
from ..kernels.problem import Problem
from ..kernels.validity import NEW_TOKENS, PAGES, STARTS
from ..runtime import context_for, isa_choice
from .elements import CODES, NAMES
from .forms import Calls, Prepared, serve
from .launch import (
    Arrays,
    AttentionCall,
    attention_call,
    dense_output,
    integers,
    metadata,
    output_fields,
    prepare_outputs,
)
from .pages import check_pages, check_row_dtype, check_used_pages, read_block_table

_decodes: Calls[AttentionCall] = Calls()
_extends: Calls[AttentionCall] = Calls()


def decode(q, kv_cache, block_table, seq_lens, *, scale, kv_lora_rank=512, cache_scale=None, out=None, lse=None,
           isa=None, tiling=None, validate=True):  # fmt: skip
    """Attention of one new token a request over its latent cache (absorbed MLA).

    ``out[b, h] = sum_s p[s] row[s, :Dc] / sum_s p[s]``, ``p[s] = exp(scale * (q[b, h] . row[s]))``,
    ``lse[b, h] = ln sum_s p[s]``, over the ``seq_lens[b]`` cached rows of request b.

    Parameters
    ----------
    q : ndarray (B, H, Dc + Dr), or pair of ndarray (B, H, Dc) and (B, H, Dr)
        Absorbed queries, float32, float16 or bfloat16: ``[q_nope @ W_UK | q_pe]``.
    kv_cache : ndarray (num_blocks, block_size, Dc + Dr), or uint8 (num_blocks, block_size, 656)
        The paged cache, rows ``[latent | rotated key]``: of q's dtype, float8_e4m3fn, float8_e5m2, or in
        FlashMLA's layout of 656 bytes (512 e4m3fn, 4 float32 scales, 64 bfloat16), whose row means the latents
        code * scale, a float32 product rounded once to bfloat16, whatever q's dtype.
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
    tiling : Tiling, optional
        How the work is tiled, where not as the instruction set's own tiling has it.
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
    latent, rotary = _parts(q)
    lengths, table = integers("seq_lens", seq_lens, ("B",)), _table(block_table)
    arrays = Arrays(latent, rotary, kv_cache, None, out, lse, lengths, None, table)
    return _attend(_decodes, arrays, q, scale, kv_lora_rank, cache_scale, False, isa, tiling, validate)


def extend(q, kv_cache, block_table, seq_lens, query_start_loc, *, scale, kv_lora_rank=512, cache_scale=None,
           causal=True, out=None, lse=None, isa=None, tiling=None, validate=True):  # fmt: skip
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
    tiling : Tiling, optional
        How the work is tiled, where not as the instruction set's own tiling has it.
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
    latent, rotary = _parts(q)
    lengths, starts = integers("seq_lens", seq_lens, ("B",)), integers("query_start_loc", query_start_loc, ("B + 1",))
    arrays = Arrays(latent, rotary, kv_cache, None, out, lse, lengths, starts, _table(block_table))
    return _attend(_extends, arrays, q, scale, kv_lora_rank, cache_scale, causal, isa, tiling, validate)


def _parts(q) -> tuple[Any, Any]:
    """The queries' array and None, or its two parts; what is neither goes on to be refused."""
    return (q[0], q[1]) if type(q) in (tuple, list) and len(q) == 2 else (q, None)


def _table(block_table):
    """The block table as it is, if an array or None."""
    return None if block_table is None else integers("block_table", block_table, ("B", "M"))


def _attend(calls: Calls[AttentionCall], arrays: Arrays, q, scale, kv_lora_rank, cache_scale, causal, isa, tiling,
            validate) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Run a call like one that was checked before, or check it."""
    # Numbers that are equal and of other types are other settings: 1.0, 1 and True.
    settings = (type(q), type(scale), scale, type(kv_lora_rank), kv_lora_rank, type(cache_scale), cache_scale,
                type(causal), causal, isa_choice(isa), tiling, type(validate), validate)  # fmt: skip

    def prepare() -> Prepared[AttentionCall]:
        return _prepare(arrays, q, scale, kv_lora_rank, cache_scale, causal, isa, tiling, validate)

    done = serve(calls, settings, arrays, prepare)
    return done.out, done.lse


def _inputs(arrays: Arrays) -> dict[str, np.ndarray]:
    """What outputs must not meet."""
    queries = {"q": arrays.q} if arrays.q_pe is None else {"q_latent": arrays.q, "q_pe": arrays.q_pe}
    return queries | {"kv_cache": arrays.keys}


def _prepare(
    given: Arrays, q, scale, kv_lora_rank, cache_scale, causal, isa, tiling, validate
) -> Prepared[AttentionCall]:
    """Check all arguments but what metadata hold; a decode has no start locations."""
    of_decode = given.query_start_loc is None
    lengths = metadata("seq_lens", given.seq_lens, ("B",))
    parts, rank, width = _check_queries(q, "B" if of_decode else "T", kv_lora_rank)
    latent, rotary = parts[0], parts[-1]
    starts = _check_requests(given, lengths, len(latent))
    table = None if given.table is None else metadata("block_table", given.table, (len(lengths), "M"))
    pages = check_pages(given.keys, rank, width, cache_scale)
    check_row_dtype("q", latent, pages)
    scale = check_scale("scale", scale)
    causal = check_flag("causal", causal)
    checks = STARTS
    if check_flag("validate", validate):
        checks = PAGES if of_decode else NEW_TOKENS
    out, lse = prepare_outputs(given.out, given.lse, (*latent.shape[:2], rank), latent.dtype)
    target = dense_output(out)
    problem = Problem(
        0, latent.strides[0], latent.strides[1],
        q_pe=0 if len(parts) == 2 else rank * latent.itemsize, q_pe_token_stride=rotary.strides[0],
        q_pe_head_stride=rotary.strides[1], q_split=rank, q_element=CODES[latent.dtype],
        num_heads=latent.shape[1], group_heads=latent.shape[1],
        keys=0, key_page_stride=pages.page_stride, key_row_stride=pages.row_stride, key_head_stride=0,
        values=0, value_page_stride=0, value_row_stride=0, value_head_stride=0,
        row_element=pages.element, block_size=pages.block_size, width=width, value_width=rank,
        causal=int(causal), num_tokens=len(latent), num_pages=len(given.keys), **output_fields(target, lse),
    )  # fmt: skip
    arrays = Arrays(latent, rotary if len(parts) == 2 else None, given.keys, None, target, lse, lengths, starts, table)
    context = context_for(isa, NAMES[latent.dtype], tiling)
    # The cache's scale multiplies every score and every value: once a score's factor and once the result's.
    call = attention_call(problem, scale * pages.scale, pages.scale, context, arrays, checks, _inputs, _explain)
    return Prepared(call, arrays, out)


def _check_requests(given: Arrays, lengths: np.ndarray, num_tokens: int) -> np.ndarray | None:
    """Start locations, if there are any; as many requests, with as many tokens, in all arrays."""
    if given.query_start_loc is None:
        metadata("seq_lens", lengths, (num_tokens,))
        return None
    starts = metadata("query_start_loc", given.query_start_loc, ("B + 1",))
    if len(lengths) != len(starts) - 1:
        check_start_locations("query_start_loc", starts, num_tokens, "q")
        metadata("seq_lens", lengths, (len(starts) - 1,))
    return starts


def _check_queries(q, tokens: str, kv_lora_rank: int) -> tuple[tuple[np.ndarray, ...], int, int]:
    """The queries or their two parts, elements of a row side by side; Dc, and Dc + Dr."""
    rank = check_count("kv_lora_rank", kv_lora_rank, 1)
    if isinstance(q, (tuple, list)):
        if len(q) != 2:
            raise ValueError(f"q: expected one array or the pair (q_latent, q_pe), got {len(q)} items")
        latent = check_array("q_latent", q[0], (tokens, "H", rank))
        rotary = check_array("q_pe", q[1], (*latent.shape[:2], "Dr"), (latent.dtype,))
        parts: tuple[np.ndarray, ...] = dense_rows(latent), dense_rows(rotary)
        width = rank + rotary.shape[2]
    else:
        parts = (dense_rows(check_array("q", q, (tokens, "H", "Dc + Dr"))),)
        width = parts[0].shape[2]
        if width < rank:
            raise ValueError(f"q: expected a width of at least kv_lora_rank = {rank}, got {describe(parts[0])}")
    if parts[0].shape[1] == 0:
        raise ValueError(f"q: expected at least one head, got {describe(parts[0])}")
    return parts, rank, width


def _explain(arrays: Arrays) -> None:
    """Say what is wrong with the metadata of a call that was refused for them."""
    lengths = check_integers("seq_lens", arrays.seq_lens, ("B",))
    if arrays.query_start_loc is not None:
        starts = check_integers("query_start_loc", arrays.query_start_loc, ("B + 1",))
        check_start_locations("query_start_loc", starts, len(arrays.q), "q")
        _check_new_tokens(lengths, starts)
    check_used_pages(read_block_table(arrays.table, len(lengths)), arrays.keys, lengths)


def _check_new_tokens(lengths: np.ndarray, starts: np.ndarray) -> None:
    """Lengths that count the new tokens."""
    short = np.flatnonzero((lengths < np.diff(starts)) & (np.diff(starts) > 0))
    if len(short):
        r = int(short[0])
        raise ValueError(
            f"seq_lens: expected the new tokens to be counted, got seq_len {lengths[r]} with "
            f"{starts[r + 1] - starts[r]} new tokens in request {r}"
        )


def check_start_locations(name: str, starts: np.ndarray, num_tokens: int, owner: str) -> None:
    """Start locations, (B + 1,), that run from 0 to all tokens without falling."""
    if len(starts) < 1 or starts[0] != 0 or starts[-1] != num_tokens or (np.diff(starts) < 0).any():
        raise ValueError(
            f"{name}: expected to run from 0 to {num_tokens} (the tokens of {owner}) without falling, got "
            f"{np.array2string(starts, threshold=12, separator=', ')}"
        )
