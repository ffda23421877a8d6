"""``merge_states``: attention results over disjoint keys, made one."""

from __future__ import annotations

import numpy as np

from ..checks import address, check_array, check_output
from ..kernels.combine import merge_finished
from ..runtime import context_for, workspace
from .elements import CODES

FLOAT32 = np.dtype(np.float32)


def merge_states(out_a, lse_a, out_b, lse_b, *, out=None, lse=None):
    """Merge attention results over two disjoint sets of keys into the result over both.

    ``lse = ln(exp(lse_a) + exp(lse_b))``, ``out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b``.

    Parameters
    ----------
    out_a : ndarray (*lead, D)
        float32, float16 or bfloat16; (T, H, D) as attention gives it.
    lse_a : ndarray (*lead)
        float32 log-sum-exp of the scores behind ``out_a``, natural. -inf (or +inf) says that there were no
        keys: whatever ``out_a`` then holds, NaN included, is not looked at.
    out_b : ndarray (*lead, D)
        As ``out_a``; its dtype may differ.
    lse_b : ndarray (*lead)
        As ``lse_a``.
    out : ndarray (*lead, D), optional
        Where to write the result, of out_a's dtype; may be ``out_a`` or ``out_b``.
    lse : ndarray (*lead), optional
        Where to write the log-sum-exp, float32; may be ``lse_a`` or ``lse_b``.

    Returns
    -------
    out : ndarray (*lead, D)
        Of out_a's dtype; where one side has no keys, the other's bits; where neither has, 0.
    lse : ndarray (*lead)
        float32; -inf where neither side has keys.

    Raises
    ------
    TypeError, ValueError
        An argument other than the above; the message names it.

    Notes
    -----
    The weights are computed in float64, the blend in float32. Source: FlashAttention-2 (arXiv:2307.08691),
    section 3.1.

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> one, two = np.full((1, 1, 2), 1.0, np.float32), np.full((1, 1, 2), 2.0, np.float32)
    >>> zero = np.zeros((1, 1), np.float32)
    >>> out, lse = numba_mla.merge_states(one, zero, two, zero)
    >>> out.tolist(), lse.tolist() == [[np.float32(np.log(2))]]
    ([[[1.5, 1.5]]], True)
    """
    if not isinstance(out_a, np.ndarray) or out_a.ndim == 0:
        check_array("out_a", out_a, ("*lead", "D"))
    shape = out_a.shape
    check_array("out_a", out_a, shape)
    check_array("out_b", out_b, shape)
    check_array("lse_a", lse_a, shape[:-1], (FLOAT32,))
    check_array("lse_b", lse_b, shape[:-1], (FLOAT32,))
    if out is None:
        out = np.empty(shape, out_a.dtype)
    if lse is None:
        lse = np.empty(shape[:-1], FLOAT32)
    check_output("out", out, shape, (out_a.dtype,), {"lse_a": lse_a, "lse_b": lse_b})
    check_output("lse", lse, shape[:-1], (FLOAT32,), {"out_a": out_a, "out_b": out_b, "out": out})
    a, b = np.ascontiguousarray(out_a), np.ascontiguousarray(out_b)
    lse_a, lse_b = np.ascontiguousarray(lse_a), np.ascontiguousarray(lse_b)
    target, lse_target = _row_target(out, a, b), _row_target(lse, lse_a, lse_b)
    width = shape[-1]
    scratch = workspace.reserve(8 * width)
    merge_finished(
        context_for(), address(a), address(lse_a), address(b), address(lse_b), address(target), address(lse_target),
        lse.size, width, CODES[a.dtype], a.itemsize, CODES[b.dtype], b.itemsize,
        scratch.address,
    )  # fmt: skip
    if target is not out:
        out[...] = target
    if lse_target is not lse:
        lse[...] = lse_target
    return out, lse


def _row_target(x: np.ndarray, *inputs: np.ndarray) -> np.ndarray:
    """The output itself if rows can be written to it while the inputs are read, else a new array.

    A row is read before it is written, so an output may be an input, but not a shifted view of one.
    """
    if not x.flags.c_contiguous:
        return np.empty(x.shape, x.dtype)
    for other in inputs:
        same = address(x) == address(other) and x.itemsize == other.itemsize
        if not same and np.may_share_memory(x, other):
            return np.empty(x.shape, x.dtype)
    return x
