"""``tune``: the tiling that is fastest on one shape, on this machine."""

from __future__ import annotations

# The experiments are imported by those who make some.


def tune(op, *, num_requests=1, num_heads=128, seq_len=4096, num_new=None, block_size=64, dtype="bfloat16", isa=None,
         budget_s=30.0, change_bits=False, progress=None):  # fmt: skip
    """Search for the fastest tiling of an operation at one shape, on this machine and the threads in force.

    Nothing is applied: hand the result to the operation (``tiling=``), or keep it in a file (``Tiling.save``).

    Parameters
    ----------
    op : {"decode", "extend", "prefill"}
        The operation; inputs of the shape are made.
    num_requests, num_heads : int
        B and H.
    seq_len : int
        Tokens of each request, the new ones included.
    num_new : int, optional
        Of extend: new tokens of each request, 64 (or all) by default.
    block_size : int
        Rows of a page; unused in prefill.
    dtype : {"float32", "float16", "bfloat16"}
        Element type of queries and of the cache, or of keys and values.
    isa : str, optional
        One of ``available_isas()``; None: the one in force.
    budget_s : float
        Seconds to search, compiling other tilings included; making the inputs, the float64 reference of the default
        tiling's result and what a first call compiles come before.
    change_bits : bool
        Whether ``key_tile`` and ``kv_split``, which change bits of results, are varied too.
    progress : callable, optional
        Told how much of the time is gone, 0 to 1, and what is under way; None: a progress bar, in terminals and
        notebooks.

    Returns
    -------
    Tiling
        Names the fields that differ from ``default_tiling``; none if nothing is faster by more than 1 %.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came.

    Notes
    -----
    Coordinate descent: field after field, a few values each are measured in turns; the fastest takes the place of the
    best so far if it beats that and the default in turns of their own. Each tiling's result is checked before it is
    timed: to have the very bits of the default one, which is checked against the float64 reference (where that
    would take long, on evenly spread requests and on first, middle and last tokens); or, where bits may change,
    against the reference itself. Ctrl-C during the search ends it: what was found is returned.

    Examples
    --------
    >>> import numba_mla
    >>> tiling = numba_mla.tune("decode", num_heads=16, seq_len=64, isa="generic", budget_s=0.05)
    >>> tiling.changes_bits
    False
    """
    from .lab.search import search
    from .lab.workload import Workload

    workload = Workload(op, num_requests=num_requests, num_heads=num_heads, seq_len=seq_len, num_new=num_new,
                        block_size=block_size, dtype=dtype, isa=isa)  # fmt: skip
    return search(workload, budget_s=budget_s, change_bits=change_bits, progress=progress).tiling
