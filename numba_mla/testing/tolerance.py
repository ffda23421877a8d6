"""The one tolerance: how far a result may be from the float64 reference on the same stored bits.

For attention, with A = sum p |v| / sum p over the keys that the lane sees, n of them:

    |out - ref| <= (u_P + 2 e_s + n 2^-24) A + u_out |ref| + floor
    |lse - ref| <= e_s + n 2^-24 + 2^-22
    e_s = scale * D * 2^-24 * max_k sum_d |q_d k_d|       a score's error: D float32 products, accumulated
    u_P = `p_rounding`, 2^-8 where probabilities are rounded to bfloat16, else 0
    u_out = unit roundoff of the output's format
    floor = 2^-125 + half the output's smallest subnormal: float32 and bfloat16 units may flush a value below
            2^-126 to zero, and then the result; a subnormal result is rounded by half its spacing

The bounds and the reference come from one evaluation: A is the attention output over |v|.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from numba_mla import reference

U_FLOAT32 = 2.0**-24
FLUSHED = 2.0**-125


@dataclass(frozen=True)
class AttentionBounds:
    """A float64 attention result and how far another one may be from it, element by element."""

    out: np.ndarray
    lse: np.ndarray
    out_bound: np.ndarray
    lse_bound: np.ndarray

    def excess(self, out, lse):
        """Return the largest error of out and lse over its bound: within the tolerance if <= 1."""
        return max(excess(out, self.out, self.out_bound), excess(lse, self.lse, self.lse_bound))


def decode_bounds(
    q, kv_cache, block_table, seq_lens, *, scale, kv_lora_rank=512, cache_scale=None, p_rounding=0.0,
    out_dtype=None,
):  # fmt: skip
    """Return the AttentionBounds of `decode`; the arguments are its own, and those of `extend_bounds`.

    Examples
    --------
    >>> cache = np.array([[1.0, 3.0], [5.0, np.nan]], np.float32).reshape(2, 2, 1)
    >>> q = np.zeros((1, 1, 1), np.float32)
    >>> bounds = decode_bounds(q, cache, [[0, 1]], [3], scale=1.0, kv_lora_rank=1)
    >>> bounds.excess(bounds.out, bounds.lse), bounds.excess(bounds.out + 1e-5, bounds.lse) > 1
    (0.0, True)
    """
    return extend_bounds(
        q, kv_cache, block_table, seq_lens, range(len(seq_lens) + 1), scale=scale, kv_lora_rank=kv_lora_rank,
        cache_scale=cache_scale, p_rounding=p_rounding, out_dtype=out_dtype,
    )  # fmt: skip


def extend_bounds(
    q, kv_cache, block_table, seq_lens, query_start_loc, *, scale, kv_lora_rank=512, cache_scale=None,
    causal=True, p_rounding=0.0, out_dtype=None,
):  # fmt: skip
    """Return the AttentionBounds of `extend`.

    Parameters
    ----------
    q, kv_cache, block_table, seq_lens, query_start_loc, scale : as in `extend`
    kv_lora_rank, cache_scale, causal : as in `extend`
    p_rounding : float, unit roundoff to which the ISA rounds probabilities: 2^-8 or 0
    out_dtype : dtype of the output; None: that of q
    """
    q = reference.joined_query(q)
    blocks = reference.latent_blocks(
        q, kv_cache, block_table, seq_lens, query_start_loc, kv_lora_rank, cache_scale, causal
    )
    return _attention_bounds(blocks, (*q.shape[:2], kv_lora_rank), scale, p_rounding, out_dtype or q.dtype)


def prefill_bounds(q, k, v, query_start_loc, kv_start_loc=None, *, scale, causal=True, p_rounding=0.0, out_dtype=None):
    """Return the AttentionBounds of `prefill`.

    Parameters
    ----------
    q, k, v, query_start_loc, kv_start_loc, scale, causal : as in `prefill`
    p_rounding, out_dtype : as in `extend_bounds`
    """
    blocks = reference.dense_blocks(q, k, v, query_start_loc, kv_start_loc, causal)
    return _attention_bounds(blocks, (*q.shape[:2], v.shape[-1]), scale, p_rounding, out_dtype or q.dtype)


def masked_bounds(q, k, v, visible, *, scale, p_rounding=0.0, out_dtype=None):
    """Return the AttentionBounds of one head whose queries see any of the keys.

    Parameters
    ----------
    q, k, v : (T, D), (S, D), (S, Dv)
    visible : bool (T, S), the keys that each query sees
    scale : float
    p_rounding, out_dtype : as in `extend_bounds`

    Examples
    --------
    >>> x = np.ones((2, 1), np.float32)
    >>> masked_bounds(x, x, x, np.eye(2, dtype=bool), scale=1.0).lse.tolist()
    [1.0, 1.0]
    """
    wide_q, wide_k, wide_v = (x.astype(np.float64)[:, None] for x in (q, k, v))
    blocks = (
        (slice(t, t + 1), wide_q[t : t + 1], wide_k[seen], wide_v[seen], np.array([seen.sum()]))
        for t, seen in enumerate(visible)
    )
    found = _attention_bounds(blocks, (len(q), 1, v.shape[1]), scale, p_rounding, out_dtype or q.dtype)
    return AttentionBounds(found.out[:, 0], found.lse[:, 0], found.out_bound[:, 0], found.lse_bound[:, 0])


@np.errstate(all="ignore")
def _attention_bounds(blocks, out_shape, scale, p_rounding, out_dtype):
    out, out_bound = np.zeros(out_shape), np.zeros(out_shape)
    lse, lse_bound = np.zeros(out_shape[:-1]), np.zeros(out_shape[:-1])
    for tokens, q, k, v, num_visible in blocks:
        both, lse[tokens] = reference.attend(q, k, np.concatenate([v, abs(v)], axis=-1), num_visible, scale)
        out[tokens], average = np.split(both, 2, axis=-1)  # average: A

        visible = np.arange(len(k)) < num_visible[:, None, None]  # [t, 1, s]
        magnitude = np.where(visible, reference.scores(abs(q), abs(k)), 0.0).max(axis=-1, initial=0.0)
        score_error = scale * q.shape[-1] * U_FLOAT32 * magnitude  # [t, h]
        sum_error = (num_visible * U_FLOAT32)[:, None]  # [t, 1]

        out_bound[tokens] = (p_rounding + 2 * score_error + sum_error)[..., None] * average
        lse_bound[tokens] = score_error + sum_error + 2.0**-22
    return AttentionBounds(out, lse, out_bound + _output_rounding(out, out_dtype), lse_bound)


@np.errstate(all="ignore")
def bmm_bounds(a, w, *, scale=None, out_dtype=None):
    """Return `bmm`'s float64 result and its bound: a dot product of K float32 terms.

    |out - ref| <= (K + 2) 2^-24 scale sum_k |a_k w_k| + u_out |ref| + floor; the 2 are the rounding of the
    scale to float32 and the product with it. Block scales, as sums of P parts of at most n terms are scaled and
    then added, keep to it: n products and sums, the product with the scale and P - 1 sums are n + P <= K + 1 roundings.

    Parameters
    ----------
    a : (H, M, K)
    w : (H, N, K), unpacked, or what `reference.pack_weight` returned
    scale : float or None
    out_dtype : dtype of the output; None: that of a

    Returns
    -------
    out, bound : float64 (H, M, N)

    Examples
    --------
    >>> a = np.ones((1, 1, 2), np.float32)
    >>> out, bound = bmm_bounds(a, a)
    >>> out.item(), excess(2 * a[..., :1], out, bound), excess(out + 1e-5, out, bound) > 1
    (2.0, 0.0, True)
    """
    out = reference.bmm(a, w, scale=scale)
    terms = reference.bmm(abs(a), abs(w), scale=scale)
    return out, (a.shape[-1] + 2) * U_FLOAT32 * terms + _output_rounding(out, out_dtype or a.dtype)


@np.errstate(all="ignore")
def merge_bounds(out_a, lse_a, out_b, lse_b, *, out_dtype=None):
    """Return the AttentionBounds of `merge_states`.

    With weights w_a + w_b = 1 and d = |lse_a - lse_b|, exp(-d) is off by a factor of 1 + (3 d + 4) 2^-24: the
    difference, its product with log2 e and that constant are rounded, and the exponential itself is good to 4
    units; this moves each weight by w_a w_b as much. The products, their sum and the division add 4 units:

    |out - ref| <= w_a w_b (3 d + 4) 2^-24 |out_a - out_b| + 4 2^-24 (w_a |out_a| + w_b |out_b|)
                   + u_out |ref| + 2^-126 max(|out_a|, |out_b|) (a flushed weight) + floor
    |lse - ref| <= min(w_a, w_b) (3 d + 4) 2^-24 + 2^-24 |ref| + 2^-22

    Where one side is empty the other must come back unchanged but for the output's rounding.

    Parameters
    ----------
    out_a, lse_a, out_b, lse_b : as in `merge_states`
    out_dtype : dtype of the output; None: that of out_a

    Examples
    --------
    >>> one = np.ones(1, np.float32)
    >>> bounds = merge_bounds(one, 0.0, one, 0.0)
    >>> bounds.excess(one, np.log(2)), bounds.excess(one, np.log(2) + 1e-6) > 1
    (0.0, True)
    """
    out, lse = reference.merge_states(out_a, lse_a, out_b, lse_b)
    rounding = _output_rounding(out, out_dtype or out_a.dtype)
    out_a, lse_a, out_b, lse_b = (np.asarray(x).astype(np.float64) for x in (out_a, lse_a, out_b, lse_b))

    difference = abs(lse_a - lse_b)
    smaller = 1 / (1 + np.exp(difference))  # the smaller weight
    weight_error = (smaller * (3 * difference + 4) * U_FLOAT32)[..., None]
    weight_a = np.where(lse_a < lse_b, smaller, 1 - smaller)[..., None]
    average = weight_a * abs(out_a) + (1 - weight_a) * abs(out_b)
    out_error = (
        weight_error * (1 - smaller)[..., None] * abs(out_a - out_b)
        + 4 * U_FLOAT32 * average
        + 2.0**-126 * np.maximum(abs(out_a), abs(out_b))
    )
    lse_error = weight_error[..., 0] + U_FLOAT32 * abs(lse) + 2.0**-22

    both = ~np.isinf(lse_a) & ~np.isinf(lse_b)
    return AttentionBounds(
        out, lse, np.where(both[..., None], out_error, 0.0) + rounding, np.where(both, lse_error, 0.0)
    )


def _output_rounding(out, dtype):
    """u_out |ref| + floor."""
    info = ml_dtypes.finfo(dtype)
    return float(info.eps) / 2 * abs(out) + FLUSHED + float(info.smallest_subnormal) / 2


@np.errstate(all="ignore")
def excess(actual, expected, bound):
    """Return the largest error over its bound: within the tolerance if <= 1.

    NaN agrees with NaN and an infinity with the same one; against anything else either is an infinite excess.
    So is any error where the bound is 0 or NaN.

    Parameters
    ----------
    actual, expected : arrays of one shape
    bound : array that broadcasts to it

    Returns
    -------
    float, 0 for arrays without elements

    Raises
    ------
    ValueError
        If the shapes of actual and expected differ.

    Examples
    --------
    >>> excess([1.5, np.nan, -np.inf], [1.0, np.nan, -np.inf], 0.25)
    2.0
    >>> excess([np.nan], [1.0], 0.25)
    inf
    """
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    if actual.shape != expected.shape:
        raise ValueError(f"actual: expected the shape of expected, {expected.shape}, got {actual.shape}")
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    comparable = np.isfinite(actual) & np.isfinite(expected)
    ratio = np.where(comparable, abs(actual - expected) / bound, np.inf)
    ratio = np.where(same, 0.0, np.where(np.isnan(ratio), np.inf, ratio))
    return float(ratio.max(initial=0.0))
