"""Makers of adversarial inputs: shuffled pages, poisoned unused rows, empty requests and partial states.

Magnitudes are those of a real layer: latents and queries of unit variance and a scale that gives scores a
standard deviation of sqrt(3), DeepSeek V3's 1/sqrt(192) at its width of 576.
"""

import math

import numpy as np

# An unused table entry that no cache holds: reading it is out of bounds, not merely wrong.
UNUSED_PAGE_ID = 2147480000


def normal(rng, shape, dtype):
    """Return standard normal values of a shape, rounded to dtype."""
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def paged_cache(rng, seq_lens, block_size, width, dtype, shuffle=True, poison=None):
    """Return a paged cache of standard normal rows, and its block table, with pages and entries to spare.

    Parameters
    ----------
    rng : numpy.random.Generator
    seq_lens : int (B,), tokens
    block_size : int, rows of a page
    width : int, Dc+Dr
    dtype : dtype of the cache
    shuffle : bool, pages in random order
    poison : float or None, such as nan, inf or 3e38: what every unused row holds, while unused table entries
        hold a page id far outside the cache; None: zeros in both

    Returns
    -------
    kv_cache : (num_blocks, block_size, width)
    block_table : int32 (B, M), M two more than the longest request needs

    Examples
    --------
    >>> cache, table = paged_cache(np.random.default_rng(0), [3, 0], 2, 4, np.float32, poison=np.nan)
    >>> cache.shape, table.shape, int(np.isfinite(cache).all(axis=-1).sum())
    ((5, 2, 4), (2, 4), 3)
    """
    pages_used = [-(-int(seq_len) // block_size) for seq_len in seq_lens]
    num_blocks = sum(pages_used) + 3
    pages = iter(rng.permutation(num_blocks) if shuffle else range(num_blocks))
    with np.errstate(over="ignore"):  # 3e38 is inf in float16
        fill = np.float32(0 if poison is None else poison).astype(dtype)
    kv_cache = np.full((num_blocks, block_size, width), fill)
    unused = 0 if poison is None else UNUSED_PAGE_ID
    block_table = np.full((len(pages_used), max(pages_used, default=0) + 2), unused, np.int32)
    for request, seq_len in enumerate(seq_lens):
        for entry in range(pages_used[request]):
            page = block_table[request, entry] = next(pages)
            rows = min(block_size, seq_len - entry * block_size)
            kv_cache[page, :rows] = normal(rng, (rows, width), dtype)
    return kv_cache, block_table


def latent_problem(
    rng, num_heads, seq_lens, new_tokens, block_size=16, kv_lora_rank=512, rope_dim=64, dtype=np.float32, *,
    q_dtype=None, shuffle=True, poison=None,
):  # fmt: skip
    """Return `extend`'s arguments for requests of seq_lens tokens, the last new_tokens of them queries.

    Parameters
    ----------
    rng : numpy.random.Generator
    num_heads : int, H
    seq_lens, new_tokens : int (B,), tokens
    block_size, kv_lora_rank, rope_dim : int
    dtype : dtype of the cache
    q_dtype : dtype of q; None: that of the cache
    shuffle, poison : as in `paged_cache`

    Returns
    -------
    dict of keyword arguments

    Examples
    --------
    >>> problem = latent_problem(np.random.default_rng(0), 2, [5, 3], [2, 0], 2, 6, 2)
    >>> problem["q"].shape, problem["query_start_loc"].tolist()
    ((2, 2, 8), [0, 2, 2])
    """
    width = kv_lora_rank + rope_dim
    kv_cache, block_table = paged_cache(rng, seq_lens, block_size, width, dtype, shuffle, poison)
    return {
        "q": normal(rng, (sum(new_tokens), num_heads, width), q_dtype or dtype),
        "kv_cache": kv_cache,
        "block_table": block_table,
        "seq_lens": np.array(seq_lens, np.int32),
        "query_start_loc": start_locations(new_tokens),
        "scale": math.sqrt(3 / width),
        "kv_lora_rank": kv_lora_rank,
    }


def decode_problem(rng, num_heads, seq_lens, *args, **kwargs):
    """Return `decode`'s arguments: those of `latent_problem` but new_tokens, which is 1 for each request.

    >>> sorted(decode_problem(np.random.default_rng(0), 2, [5, 3], 2, 6, 2))
    ['block_table', 'kv_cache', 'kv_lora_rank', 'q', 'scale', 'seq_lens']
    """
    problem = latent_problem(rng, num_heads, seq_lens, [1] * len(seq_lens), *args, **kwargs)
    del problem["query_start_loc"]
    return problem


def prefill_problem(rng, num_heads, query_lens, kv_lens=None, qk_dim=192, v_dim=128, dtype=np.float32):
    """Return `prefill`'s arguments for ragged requests.

    Parameters
    ----------
    rng : numpy.random.Generator
    num_heads : int, H
    query_lens : int (B,), tokens
    kv_lens : int (B,), tokens; None: query_lens
    qk_dim, v_dim : int, Dn+Dr and Dv
    dtype : dtype of q, k and v

    Returns
    -------
    dict of keyword arguments

    Examples
    --------
    >>> problem = prefill_problem(np.random.default_rng(0), 2, [2, 1], [5, 3], 4, 3)
    >>> problem["q"].shape, problem["v"].shape, problem["kv_start_loc"].tolist()
    ((3, 2, 4), (8, 2, 3), [0, 5, 8])
    """
    kv_lens = query_lens if kv_lens is None else kv_lens
    return {
        "q": normal(rng, (sum(query_lens), num_heads, qk_dim), dtype),
        "k": normal(rng, (sum(kv_lens), num_heads, qk_dim), dtype),
        "v": normal(rng, (sum(kv_lens), num_heads, v_dim), dtype),
        "query_start_loc": start_locations(query_lens),
        "kv_start_loc": start_locations(kv_lens),
        "scale": math.sqrt(3 / qk_dim),
    }


def partial_states(rng, lead, v_dim, dtype=np.float32):
    """Return (out, lse) of a partial attention; a third of its lanes is empty: lse -inf or +inf, out NaN.

    >>> out, lse = partial_states(np.random.default_rng(0), (4, 8), 3)
    >>> out.shape, bool((np.isnan(out).any(axis=-1) == np.isinf(lse)).all())
    ((4, 8, 3), True)
    """
    out = normal(rng, (*lead, v_dim), dtype)
    lse = (3 * rng.standard_normal(lead)).astype(np.float32)
    emptiness = rng.integers(0, 6, lead)
    lse[emptiness == 0], lse[emptiness == 1] = -np.inf, np.inf
    out[np.isinf(lse)] = np.nan
    return out, lse


def start_locations(lengths):
    """Return the int32 start of each of consecutive runs, and the end of the last.

    >>> start_locations([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
