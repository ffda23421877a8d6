"""Multi-head Latent Attention, defined in float64 numpy.

The cache keeps one row per token, c = [latent (Dc) | k_pe (Dr)], which all heads share. A head's non-rotary
key is W_UK c and its value W_UV c. As q_nope . (W_UK c) = (W_UK^T q_nope) . c, a query that has absorbed
W_UK, q = [W_UK^T q_nope | q_pe], attends to the rows themselves; W_UV is applied to the average:

    s_p = scale * q . c_p      out = sum_p exp(s_p) latent_p / sum_p exp(s_p)      lse = ln sum_p exp(s_p)

with p over the keys that the query sees. Every function has the arguments of the operation of the same name
and takes them as valid: the operations check. Results are float64, unrounded, but stored bits (caches,
quantised weights) are exact. In every function `out` and `lse`, where given, are filled and returned in place
of new arrays, and `isa`, `tiling` and `validate` are ignored.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

import ml_dtypes
import numpy as np

FP8_DTYPES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
E4M3_MAX = np.float32(448)
# A float64 score array of 32 MB bounds the memory that a block of queries takes.
SCORES_PER_BLOCK = 2**22

_quiet = np.errstate(all="ignore")


@_quiet
def attend(q, k, v, num_visible, scale):
    """Attend from the queries of one request to the first `num_visible` keys each.

    out = sum_p exp(s_p) v_p / sum_p exp(s_p), lse = ln sum_p exp(s_p), s_p = scale * q . k_p, for float64 q
    (T, H, D), k (S, H, D), v (S, H, Dv), or 1 in place of k's and v's H where all heads share them. A key not
    seen by a query adds nothing, whatever it holds; a query that sees none gets out = 0, lse = -inf.

    >>> k, v = np.zeros((3, 1, 2)), np.array([2.0, 4.0, np.nan]).reshape(3, 1, 1)
    >>> out, lse = attend(np.ones((2, 1, 2)), k, v, np.array([0, 2]), 1.0)
    >>> out.ravel().tolist(), lse.ravel().round(4).tolist()
    ([0.0, 3.0], [-inf, 0.6931])
    """
    visible = np.arange(len(k)) < num_visible[:, None, None]  # [t, 1, s]
    s = np.where(visible, scale * scores(q, k), -np.inf)  # [t, h, s]
    highest = s.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.where(visible, np.exp(s - highest), 0.0)
    total = p.sum(axis=-1)

    # 0 * NaN is NaN: rows that are not finite are left out of the product and added where they are seen.
    finite = np.isfinite(v).all(axis=(1, 2))
    weighted = _weighted_sum(p, np.where(finite[:, None, None], v, 0.0))
    for key in np.flatnonzero(~finite):
        seen = num_visible > key
        weighted[seen] += p[seen, :, key, None] * v[key]

    empty = num_visible == 0
    out = np.where(empty[:, None, None], 0.0, weighted / total[..., None])
    lse = np.where(empty[:, None], -np.inf, highest[..., 0] + np.log(total))
    return out, lse


def scores(q, k):
    """Return the products q . k, (T, H, S), of float64 q (T, H, D) and k (S, H or 1, D)."""
    return _ungroup(_group(q, k.shape[1]) @ k.transpose(1, 2, 0), q.shape[1])


def _weighted_sum(p, v):
    """p [t, h, s], v [s, h or 1, d] -> [t, h, d]."""
    return _ungroup(_group(p, v.shape[1]) @ v.transpose(1, 0, 2), p.shape[1])


def _group(x, num_groups):
    """[t, h, d] -> [group, lane, d]: the lanes that share keys side by side."""
    num_tokens, num_heads, width = x.shape
    per_group = num_heads // num_groups
    grouped = x.reshape(num_tokens, num_groups, per_group, width).swapaxes(0, 1)
    return grouped.reshape(num_groups, num_tokens * per_group, width)


def _ungroup(x, num_heads):
    """[group, lane, d] -> [t, h, d]."""
    num_groups, num_lanes, width = x.shape
    per_group = num_heads // num_groups
    by_token = x.reshape(num_groups, num_lanes // per_group, per_group, width).swapaxes(0, 1)
    return by_token.reshape(len(by_token), num_heads, width)


def latent_blocks(q, kv_cache, block_table, seq_lens, query_start_loc, kv_lora_rank, cache_scale, causal):
    """Yield (tokens, q, k, v, num_visible), `attend`'s arguments, for the absorbed queries of `extend`."""
    for request, seq_len in enumerate(seq_lens):
        rows = _request_rows(kv_cache, block_table, request, seq_len, cache_scale)[:, None]
        queries = query_start_loc[request : request + 2]
        yield from _query_blocks(q, rows, rows[..., :kv_lora_rank], queries, causal)


def dense_blocks(q, k, v, query_start_loc, kv_start_loc, causal):
    """Yield (tokens, q, k, v, num_visible), `attend`'s arguments, for the materialised heads of `prefill`."""
    kv_start_loc = query_start_loc if kv_start_loc is None else kv_start_loc
    for request in range(len(query_start_loc) - 1):
        queries, keys = query_start_loc[request : request + 2], slice(*kv_start_loc[request : request + 2])
        yield from _query_blocks(q, _float64(k[keys]), _float64(v[keys]), queries, causal)


def _query_blocks(q, k, v, queries, causal):
    """Yield one request's queries (start, stop) in blocks, each with the keys that any of it sees."""
    start, stop = queries
    tokens_per_block = max(1, SCORES_PER_BLOCK // max(1, q.shape[1] * len(k)))
    for first in range(start, stop, tokens_per_block):
        tokens = np.arange(first, min(first + tokens_per_block, stop))
        # Bottom-right aligned: the last query sees every key, the one before it one key fewer.
        num_visible = np.maximum(len(k) - (stop - 1 - tokens), 0) if causal else np.full(len(tokens), len(k))
        last = num_visible.max()
        yield tokens, _float64(q[tokens]), k[:last], v[:last], num_visible


def _attend_blocks(blocks, out_shape, scale, out, lse):
    result, result_lse = np.zeros(out_shape), np.zeros(out_shape[:-1])
    for tokens, q, k, v, num_visible in blocks:
        result[tokens], result_lse[tokens] = attend(q, k, v, num_visible, scale)
    return _deliver(result, out), _deliver(result_lse, lse)


@_quiet
def _deliver(result, out):
    if out is None:
        return result
    out[...] = result
    return out


def joined_query(q):
    """Return q as one array (T, H, D), whether it came as one or as the pair (q_latent, q_pe)."""
    return np.concatenate(q, axis=-1) if isinstance(q, tuple | list) else q


@_quiet
def _float64(x):
    return np.asarray(x).astype(np.float64)


def decode(
    q, kv_cache, block_table, seq_lens, *, scale, kv_lora_rank=512, cache_scale=None, out=None, lse=None,
    isa=None, tiling=None, validate=True,
):  # fmt: skip
    """Attend from one absorbed query per request to the first seq_lens rows of its pages.

    It is `extend` of one token each. Returns out (B, H, Dc) and lse (B, H); 0 and -inf where seq_lens is 0.

    Parameters
    ----------
    q : (B, H, Dc+Dr), or the pair (B, H, Dc) and (B, H, Dr)
    kv_cache : (num_blocks, block_size, Dc+Dr), a float format or fp8; or uint8 (num_blocks, block_size, 656)
    block_table : int (B, M), page ids; None: page b is request b
    seq_lens : int (B,), tokens
    scale : float, multiplies the scores
    kv_lora_rank : int, Dc: the values are a row's first Dc columns
    cache_scale : float or None, value = stored * cache_scale for fp8 caches
    out, lse, isa, tiling, validate : as everywhere here

    >>> cache = np.array([[1.0, 3.0], [5.0, np.nan]]).reshape(2, 2, 1)
    >>> out, lse = decode(np.zeros((1, 1, 1)), cache, [[0, 1]], [3], scale=1.0, kv_lora_rank=1)
    >>> out.item(), round(lse.item(), 4)
    (3.0, 1.0986)
    """
    return extend(
        q, kv_cache, block_table, seq_lens, range(len(seq_lens) + 1), scale=scale, kv_lora_rank=kv_lora_rank,
        cache_scale=cache_scale, out=out, lse=lse,
    )  # fmt: skip


def extend(
    q, kv_cache, block_table, seq_lens, query_start_loc, *, scale, kv_lora_rank=512, cache_scale=None,
    causal=True, out=None, lse=None, isa=None, tiling=None, validate=True,
):  # fmt: skip
    """Attend from each request's new absorbed queries to its cache rows, the new tokens' own included.

    Of n new queries, the i-th sees the first seq_len - n + i + 1 keys; all of them if not `causal`.
    Returns out (T, H, Dc) and lse (T, H); 0 and -inf where no key is seen.

    Parameters
    ----------
    q : (T, H, Dc+Dr), or the pair (T, H, Dc) and (T, H, Dr)
    kv_cache, block_table, seq_lens, scale, kv_lora_rank, cache_scale : as in `decode`
    query_start_loc : int (B+1,), first query of each request, from 0 to T
    causal : bool
    out, lse, isa, tiling, validate : as everywhere here

    >>> cache = np.array([1.0, 3.0, 8.0]).reshape(1, 3, 1)
    >>> extend(np.zeros((2, 1, 1)), cache, None, [3], [0, 2], scale=1.0, kv_lora_rank=1)[0].ravel().tolist()
    [2.0, 4.0]
    """
    q = joined_query(q)
    blocks = latent_blocks(q, kv_cache, block_table, seq_lens, query_start_loc, kv_lora_rank, cache_scale, causal)
    return _attend_blocks(blocks, (*q.shape[:2], kv_lora_rank), scale, out, lse)


def prefill(
    q, k, v, query_start_loc, kv_start_loc=None, *, scale, causal=True, out=None, lse=None, isa=None,
    tiling=None, validate=True,
):  # fmt: skip
    """Attend, request by request, from dense queries to dense keys and values per head.

    Of n queries over m keys the i-th sees the first m - n + i + 1 (none if that is not positive); all if not
    `causal`. A NaN in k reaches the whole lane and its lse; a NaN in v only the value columns that hold it.
    Returns out (Tq, H, Dv) and lse (Tq, H); 0 and -inf where no key is seen.

    Parameters
    ----------
    q, k, v : (Tq, H, Dn+Dr), (Tk, H, Dn+Dr), (Tk, H, Dv)
    query_start_loc : int (B+1,), first query of each request, from 0 to Tq
    kv_start_loc : int (B+1,), first key of each request, from 0 to Tk; None: query_start_loc
    scale : float, multiplies the scores
    causal : bool
    out, lse, isa, tiling, validate : as everywhere here

    >>> q, v = np.zeros((3, 1, 1)), np.array([2.0, 4.0]).reshape(2, 1, 1)
    >>> prefill(q, np.zeros((2, 1, 1)), v, [0, 3], [0, 2], scale=1.0)[0].ravel().tolist()
    [0.0, 2.0, 3.0]
    """
    blocks = dense_blocks(q, k, v, query_start_loc, kv_start_loc, causal)
    return _attend_blocks(blocks, (*q.shape[:2], v.shape[-1]), scale, out, lse)


@_quiet
def merge_states(out_a, lse_a, out_b, lse_b, *, out=None, lse=None):
    """Merge two partial attention results over disjoint keys.

    out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b), lse = ln(e^lse_a + e^lse_b). An lse of either
    infinity means "no keys": that side's out is not used, and two such sides give 0 and -inf.
    Source: Milakov and Gimelshein, arXiv:1805.02867, section 3.1.

    Parameters
    ----------
    out_a, out_b : (*lead, D)
    lse_a, lse_b : (*lead), natural logarithms
    out, lse : arrays to fill and return, inputs allowed

    >>> merge_states(np.full(1, 2.0), 0.0, np.full(1, 4.0), 0.0)[0].tolist()
    [3.0]
    >>> merge_states(np.full(1, np.nan), np.inf, np.full(1, 4.0), 1.5)
    (array([4.]), array(1.5))
    """
    out_a, lse_a, out_b, lse_b = (_float64(x) for x in (out_a, lse_a, out_b, lse_b))
    empty_a, empty_b = np.isinf(lse_a), np.isinf(lse_b)
    highest = np.maximum(lse_a, lse_b)
    weight_a, weight_b = np.exp(lse_a - highest), np.exp(lse_b - highest)
    both = (weight_a[..., None] * out_a + weight_b[..., None] * out_b) / (weight_a + weight_b)[..., None]
    both_lse = highest + np.log(weight_a + weight_b)

    cases = [empty_a & empty_b, empty_a, empty_b]
    result = np.select([case[..., None] for case in cases], [0, out_b, out_a], both)
    result_lse = np.select(cases, [-np.inf, lse_b, lse_a], both_lse)
    return _deliver(result, out), _deliver(result_lse, lse)


@_quiet
def write_cache(kv_c, k_pe, kv_cache, slot_mapping, *, cache_scale=None, pad_slot_id=-1, validate=True):
    """Write the rows [kv_c | k_pe] to their slots; slot = page * block_size + row within it.

    An fp8 cache stores float32(x) / float32(cache_scale), saturated to the largest finite value; NaN stays
    NaN. A 656-byte row holds 512 e4m3fn codes of latent / scale, 4 float32 scales, one per 128 (the largest
    finite |latent| over 448, at least float32's smallest normal), and 64 bfloat16 of k_pe. It is read as 576
    bfloat16: code * scale, a float32 product, is rounded once.

    Parameters
    ----------
    kv_c, k_pe : (T, Dc), and (T, Dr) or (T, 1, Dr)
    kv_cache : (num_blocks, block_size, Dc+Dr), or uint8 with last axis 656; written in place
    slot_mapping : int (<= T,); the rows past it are padding
    cache_scale : float or None (1), for fp8 caches
    pad_slot_id : int, the slot of a row that is not written
    validate : ignored

    >>> cache = np.zeros((2, 2, 2))
    >>> write_cache(np.ones((2, 1)), np.full((2, 1), 5.0), cache, [-1, 3])
    >>> cache.ravel().tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 5.0]
    """
    slots = np.asarray(slot_mapping, np.int64)
    written = np.flatnonzero(slots != pad_slot_id)
    rows = np.concatenate([kv_c, np.reshape(k_pe, (len(kv_c), k_pe.shape[-1]))], axis=-1)[written]
    page, row = np.divmod(slots[written], kv_cache.shape[1])
    kv_cache[page, row] = _encoded(rows, kv_cache, cache_scale)


def gather_cache(
    kv_cache, block_table, seq_lens, *, starts=None, kv_lora_rank=512, cache_scale=None, dtype=None, out=None,
    validate=True,
):  # fmt: skip
    """Gather each request's rows starts <= p < seq_lens from its pages, one request after the other.

    Returns kv_c (rows, Dc), k_pe (rows, Dr) and kv_start_loc, int32 (B+1,): the first row of each request.

    Parameters
    ----------
    kv_cache, block_table, seq_lens, kv_lora_rank, cache_scale : as in `decode`
    starts : int (B,), first position of each request; None: 0
    out : pair of arrays (kv_c, k_pe) to fill and return
    dtype, validate : ignored, the result is float64

    >>> cache = np.arange(8.0).reshape(2, 2, 2)
    >>> kv_c, k_pe, kv_start_loc = gather_cache(cache, [[1, 0]], [3], starts=[1], kv_lora_rank=1)
    >>> kv_c.ravel().tolist(), k_pe.ravel().tolist(), kv_start_loc.tolist()
    ([6.0, 0.0], [7.0, 1.0], [0, 2])
    """
    starts = [0] * len(seq_lens) if starts is None else starts
    # The empty head keeps the width for a batch of no requests.
    parts = [_decoded(kv_cache[:0].reshape(0, kv_cache.shape[-1]), cache_scale)]
    for request, (start, seq_len) in enumerate(zip(starts, seq_lens, strict=True)):
        parts.append(_request_rows(kv_cache, block_table, request, seq_len, cache_scale)[start:])
    rows = np.concatenate(parts)
    kv_start_loc = np.cumsum([len(part) for part in parts], dtype=np.int32)
    out_c, out_pe = (None, None) if out is None else out
    return _deliver(rows[:, :kv_lora_rank], out_c), _deliver(rows[:, kv_lora_rank:], out_pe), kv_start_loc


def expand_block_table(block_table, block_size):
    """Return the slots of all pages' rows, (B, M * block_size): page * block_size + row; -1 stays -1.

    Parameters
    ----------
    block_table, block_size : int (B, M), page ids, and int, rows of a page

    >>> expand_block_table(np.array([[3, -1]]), 2).tolist()
    [[6, 7, -1, -1]]
    """
    table = np.asarray(block_table)
    slots = np.where(table[..., None] == -1, -1, table[..., None] * block_size + np.arange(block_size))
    return slots.reshape(len(table), table.shape[1] * block_size).astype(table.dtype)


def num_kv_splits(max_seq_len, num_threads):
    """Return vLLM's KV splits: the smallest power of two >= max(1, max_seq_len // 512), <= 2 * num_threads.

    >>> [num_kv_splits(n, 16) for n in (0, 1023, 1024, 1536, 4096)], num_kv_splits(4096, 3)
    ([1, 1, 2, 4, 8], 6)
    """
    wanted = max(1, max_seq_len // 512)
    return min(1 << (wanted - 1).bit_length(), 2 * num_threads)


def _request_rows(kv_cache, block_table, request, seq_len, cache_scale):
    """The first seq_len rows of a request, as float64 (seq_len, width); no other page is read."""
    _, block_size, width = kv_cache.shape
    num_pages = -(-seq_len // block_size)
    pages = [request] if block_table is None else np.asarray(block_table)[request, :num_pages]
    rows = kv_cache[pages].reshape(len(pages) * block_size, width)[:seq_len]
    return _decoded(rows, cache_scale)


def _is_656(rows):
    return rows.dtype == np.uint8 and rows.shape[-1] == 656


def _decoded(rows, cache_scale):
    """Stored rows (n, width) as float64 values."""
    if _is_656(rows):
        scales = rows[:, 512:528].view(np.float32).repeat(128, axis=1)
        latent = (rows[:, :512].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales).astype(ml_dtypes.bfloat16)
        return _float64(np.concatenate([latent, rows[:, 528:].view(ml_dtypes.bfloat16)], axis=-1))
    return _float64(rows) * (1.0 if cache_scale is None else cache_scale)


def _encoded(rows, kv_cache, cache_scale):
    """Values (n, Dc+Dr) as rows of the cache, in its dtype."""
    if _is_656(kv_cache):
        latent = rows[:, :512].astype(np.float32).reshape(-1, 4, 128)
        largest = np.where(np.isfinite(latent), abs(latent), 0).max(axis=-1, keepdims=True)
        scales = np.maximum(largest / E4M3_MAX, np.finfo(np.float32).tiny)
        codes = _saturated(latent / scales, ml_dtypes.float8_e4m3fn).reshape(-1, 512)
        k_pe = rows[:, 512:].astype(ml_dtypes.bfloat16)
        return np.concatenate([part.view(np.uint8) for part in (codes, scales[..., 0], k_pe)], axis=-1)
    if kv_cache.dtype in FP8_DTYPES:
        scale = np.float32(1 if cache_scale is None else cache_scale)
        return _saturated(rows.astype(np.float32) / scale, kv_cache.dtype)
    return rows.astype(kv_cache.dtype)


def _saturated(x, dtype):
    """x in an fp8 format: beyond its range the largest finite value, NaN stays NaN."""
    limit = np.float32(ml_dtypes.finfo(dtype).max)
    return x.clip(-limit, limit).astype(dtype)


@_quiet
def bmm(a, w, *, scale=None, out=None):
    """Return out (H, M, N), a batch of matrices times transposed weights: out[h] = scale * a[h] @ w[h]^T.

    Parameters
    ----------
    a : (H, M, K)
    w : (H, N, K), or what `pack_weight` returned
    scale : float or None (1)
    out : array to fill and return in place of a new one

    >>> bmm(np.array([[[1.0, 2.0]]]), np.array([[[3.0, 4.0], [5.0, 6.0]]]), scale=0.5).tolist()
    [[[5.5, 8.5]]]
    """
    return _deliver((_float64(a) @ _float64(w).swapaxes(1, 2)) * (1.0 if scale is None else scale), out)


@_quiet
def pack_weight(w, *, scale=None, block_size=None, isa=None):
    """Return a weight for `bmm`, (H, N, K), dequantised: value = stored * scale of its block.

    Parameters
    ----------
    w : (H, N, K), or the triple (weight, scale, block_size)
    scale : None (1), a float, or (H, ceil(N/bn), ceil(K/bk)), one scale per block
    block_size : (bn, bk), with a scale per block
    isa : ignored

    >>> pack_weight(np.ones((1, 1, 3)), scale=np.array([[[2.0, 4.0]]]), block_size=(1, 2)).tolist()
    [[[2.0, 2.0, 4.0]]]
    """
    if isinstance(w, tuple):
        w, scale, block_size = w
    if scale is None:
        scale = 1.0
    elif block_size is not None:
        scale = _float64(scale).repeat(block_size[0], axis=1).repeat(block_size[1], axis=2)
        scale = scale[:, : w.shape[1], : w.shape[2]]
    return _float64(w) * scale


@_quiet
def block_quant_to_tensor_quant(weight, weight_scale, block_size):
    """Requantise a weight with one scale per block to one scale for all of it, in float32.

    x = weight * weight_scale, amax = max(|x|, 1e-12), w' = e4m3fn(clip(x * (448/amax), +-448)), d = amax/448.
    Returns w', float8_e4m3fn (n, k), and d, a float32 scalar.

    Parameters
    ----------
    weight : float8_e4m3fn (n, k)
    weight_scale : (ceil(n/bn), ceil(k/bk))
    block_size : (bn, bk)

    >>> w = np.array([[1.0, 2.0]], dtype=ml_dtypes.float8_e4m3fn)
    >>> w, d = block_quant_to_tensor_quant(w, np.array([[1.0, 2.0]]), (1, 1))
    >>> w.astype(float).tolist(), float(d * 448)
    ([[112.0, 448.0]], 4.0)
    """
    scale = np.asarray(weight_scale).astype(np.float32)
    for axis in (0, 1):
        if scale.shape[axis] < weight.shape[axis]:
            scale = scale.repeat(block_size[axis], axis=axis)
    x = weight.astype(np.float32) * scale[: weight.shape[0], : weight.shape[1]]
    largest = abs(x).max(initial=np.float32(1e-12))
    return _saturated(x * (E4M3_MAX / largest), weight.dtype), largest / E4M3_MAX


def absorb_weights(kv_b_proj, num_heads, qk_nope_head_dim, v_head_dim):
    """Split kv_b_proj into the weights that queries absorb and that outputs pass through.

    Returns w_uk (H, Dc, Dn) and w_uv (H, Dv, Dc): q_latent = bmm(q_nope, w_uk), value = bmm(out, w_uv).

    Parameters
    ----------
    kv_b_proj : (H * (Dn+Dv), Dc), each head's Dn key rows before its Dv value rows; or (weight, scale, block_size)
    num_heads, qk_nope_head_dim, v_head_dim : int, H, Dn, Dv

    >>> w_uk, w_uv = absorb_weights(np.arange(6.0).reshape(3, 2), 1, 1, 2)
    >>> w_uk.tolist(), w_uv.tolist()
    ([[[0.0], [1.0]]], [[[2.0, 3.0], [4.0, 5.0]]])
    """
    if isinstance(kv_b_proj, tuple):
        weight, scale, block_size = kv_b_proj
        kv_b_proj = pack_weight(weight[None], scale=scale[None], block_size=block_size)[0]
    head_width = qk_nope_head_dim + v_head_dim
    w = _float64(kv_b_proj).reshape(num_heads, head_width, kv_b_proj.shape[-1])
    return w[:, :qk_nope_head_dim].swapaxes(1, 2), w[:, qk_nope_head_dim:]


@_quiet
def apply_rope(x, positions, *, inv_freq, interleaved, scaling=1.0):
    """Return x with pair i rotated by the angle position * inv_freq[i]; the pairs stay where they are.

    (a, b) -> scaling * (a cos - b sin, b cos + a sin); pair i is elements 2i and 2i+1 if `interleaved`, else
    i and i + Dr/2.
    Source: Su et al., arXiv:2104.09864, section 3.4.2; scaling: Peng et al., arXiv:2309.00071, section 3.4.

    Parameters
    ----------
    x : (T, H, Dr) or (T, Dr)
    positions : int (T,)
    inv_freq : (Dr/2,), radians per position
    interleaved : bool
    scaling : float, multiplies cos and sin

    >>> apply_rope(np.array([[1.0, 2.0]]), [1], inv_freq=[np.pi / 2], interleaved=True).round(9).tolist()
    [[-2.0, 1.0]]
    """
    x = _float64(x)
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    angle = np.multiply.outer(_float64(positions), _float64(inv_freq))  # [t, pair]
    angle = angle.reshape(len(x), *(1,) * (x.ndim - 2), half)
    cos, sin = scaling * np.cos(angle), scaling * np.sin(angle)
    rotated = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1 if interleaved else -2)
    return rotated.reshape(x.shape)
