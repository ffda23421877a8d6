"""``prefill``: materialised attention, with keys and values of each head."""

from __future__ import annotations

import numpy as np

from ..checks import MAX_POSITIONS, check_array, check_flag, check_integers, check_scale, dense_rows, describe
from ..kernels.problem import ENDLESS, Problem
from ..kernels.validity import STARTS
from ..runtime import context_for, isa_choice
from .attention import check_start_locations
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

_calls: Calls[AttentionCall] = Calls()


def prefill(q, k, v, query_start_loc, kv_start_loc=None, *, scale, causal=True, out=None, lse=None, isa=None,
            tiling=None, validate=True):  # fmt: skip
    """Attention of ragged requests over materialised keys and values.

    ``out[t, h] = sum_s p[s] v[s, h] / sum_s p[s]``, ``p[s] = exp(scale * (q[t, h] . k[s, h]))``,
    ``lse[t, h] = ln sum_s p[s]``, over the keys of t's request: causal, aligned bottom-right, token i of n sees
    the first ``kv_len - n + i + 1`` of ``kv_len`` keys; else all.

    Parameters
    ----------
    q : ndarray (Tq, H, D)
        Queries of all requests, one request after the other: float32, float16 or bfloat16, D = Dn + Dr.
    k : ndarray (Tk, H, D)
        Keys, of q's dtype.
    v : ndarray (Tk, H, Dv)
        Values, of q's dtype; Dv may differ from D.
    query_start_loc : int array or list (B + 1,)
        Where each request's queries begin in q, from 0 to Tq.
    kv_start_loc : int array or list (B + 1,), optional
        Where each request's keys begin in k, from 0 to Tk; None: as query_start_loc.
    scale : float
        Factor on the scores, finite and positive.
    causal : bool
        Whether a token sees only itself and what came before it.
    out : ndarray (Tq, H, Dv), optional
        Where to write the result: of q's dtype, or float32.
    lse : ndarray (Tq, H), optional
        Where to write the log-sum-exp, float32.
    isa : str, optional
        The instruction set to use, one of ``available_isas()``.
    tiling : Tiling, optional
        How the work is tiled, where not as the instruction set's own tiling has it.
    validate : bool
        Taken for the sake of a uniform signature: start locations are always checked.

    Returns
    -------
    out : ndarray (Tq, H, Dv)
        A query that sees no key gets 0.
    lse : ndarray (Tq, H)
        float32, natural logarithm; -inf for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        Before any kernel runs, naming the argument, what was expected and what came.

    Notes
    -----
    As ``extend``: float32 accumulation, the same bits for any threads and batch, unseen rows add nothing.
    Source: FlashAttention-2 (arXiv:2307.08691); the alignment of its released kernels.

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> q, k, v = np.zeros((3, 1, 4), np.float32), np.ones((3, 1, 4), np.float32), np.ones((3, 1, 2), np.float32)
    >>> out, lse = numba_mla.prefill(q, k, v, [0, 3], scale=0.5)
    >>> np.exp(lse[:, 0]).round(3).tolist()
    [1.0, 2.0, 3.0]
    """
    starts = integers("query_start_loc", query_start_loc, ("B + 1",))
    key_starts = None if kv_start_loc is None else integers("kv_start_loc", kv_start_loc, ("B + 1",))
    arrays = Arrays(q, None, k, v, out, lse, None, starts, key_starts)
    # Numbers that are equal and of other types are other settings: 1.0, 1 and True.
    settings = (type(scale), scale, type(causal), causal, isa_choice(isa), tiling, type(validate), validate)

    def prepare() -> Prepared[AttentionCall]:
        check_flag("validate", validate)
        return _prepare(arrays, scale, causal, isa, tiling)

    done = serve(_calls, settings, arrays, prepare)
    return done.out, done.lse


def _inputs(arrays: Arrays) -> dict[str, np.ndarray]:
    """What outputs must not meet."""
    return {"q": arrays.q, "k": arrays.keys, "v": arrays.values}


def _explain(arrays: Arrays) -> None:
    """Say what is wrong with the start locations of a call that was refused for them."""
    starts = check_integers("query_start_loc", arrays.query_start_loc, ("B + 1",))
    check_start_locations("query_start_loc", starts, len(arrays.q), "q")
    name, key_starts = "query_start_loc", starts
    if arrays.table is not None:
        name, key_starts = "kv_start_loc", check_integers("kv_start_loc", arrays.table, ("B + 1",))
    check_start_locations(name, key_starts, len(arrays.keys), "k")


def _prepare(given: Arrays, scale, causal, isa, tiling) -> Prepared[AttentionCall]:
    """Check all arguments but what start locations hold."""
    starts = metadata("query_start_loc", given.query_start_loc, ("B + 1",))
    name, key_starts = "query_start_loc", None
    if given.table is not None:
        name, key_starts = "kv_start_loc", metadata("kv_start_loc", given.table, ("B + 1",))
    q = dense_rows(check_array("q", given.q, ("Tq", "H", "D")))
    if q.shape[1] == 0 or q.shape[2] == 0:
        raise ValueError(f"q: expected at least one head and one column, got {describe(q)}")
    k = dense_rows(check_array("k", given.keys, ("Tk", q.shape[1], q.shape[2]), (q.dtype,)))
    v = dense_rows(check_array("v", given.values, (len(k), q.shape[1], "Dv"), (q.dtype,)))
    if len(k) > MAX_POSITIONS:
        raise ValueError(f"k: expected at most {MAX_POSITIONS} keys, got {describe(k)}")
    if v.shape[2] == 0:
        raise ValueError(f"v: expected at least one column, got {describe(v)}")
    if len(starts) == 0 or (key_starts is not None and len(key_starts) != len(starts)):
        check_start_locations("query_start_loc", starts, len(q), "q")
        check_start_locations(name, starts if key_starts is None else key_starts, len(k), "k")
        raise ValueError(
            f"kv_start_loc: expected {len(starts)} entries, as query_start_loc has, got {given.table.size}"
        )
    scale = check_scale("scale", scale)
    out, lse = prepare_outputs(given.out, given.lse, (*q.shape[:2], v.shape[2]), q.dtype)
    target = dense_output(out)
    problem = Problem(
        0, q.strides[0], q.strides[1], 0, q.strides[0], q.strides[1],
        q_split=q.shape[2], q_element=CODES[q.dtype], num_heads=q.shape[1], group_heads=1,
        keys=0, key_page_stride=k.strides[0], key_row_stride=k.strides[0], key_head_stride=k.strides[1],
        values=0, value_page_stride=v.strides[0], value_row_stride=v.strides[0], value_head_stride=v.strides[1],
        row_element=CODES[k.dtype], block_size=ENDLESS, width=q.shape[2], value_width=v.shape[2],
        causal=int(check_flag("causal", causal)), num_tokens=len(q), num_pages=len(k), **output_fields(target, lse),
    )  # fmt: skip
    arrays = Arrays(q, None, k, v, target, lse, None, starts, key_starts)
    context = context_for(isa, NAMES[q.dtype], tiling, one_head=True)
    return Prepared(attention_call(problem, scale, 1.0, context, arrays, STARTS, _inputs, _explain), arrays, out)
