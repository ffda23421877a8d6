"""Building blocks for attention of one's own, inside functions that Numba compiles.

``import numba_mla.jit`` tells Numba of ``ml_dtypes``' bfloat16, float8_e4m3fn and float8_e5m2: arrays of them can be
indexed in any ``@njit`` function. An element that is read takes part in arithmetic as float32, a number that is written
is rounded as ``astype`` would. ``bfloat16``, ``float8_e4m3fn`` and ``float8_e5m2`` are Numba's types of them.

The blocks are the package's own micro-kernels. ``kernels(dtype)`` is made in Python and passed to the compiled
function; there a ``lane_group``, queries that attend to the same keys, takes one key tile after another with
``score``, ``softmax`` and ``weigh_values``, between ``pack`` and ``finish``. What ``score`` returns, float32
``[key, lane]``, can be changed before the softmax, and ``mask`` hides keys outside a range of positions: that is
where variants differ.

>>> import numba, numpy as np
>>> from numba_mla import jit
>>> @numba.njit
... def soft_capped(kernels, q, k, v, scale, cap, out, lse):
...     group = jit.lane_group(kernels, len(q), 256, q.shape[1], v.shape[1], 1.0)
...     jit.pack(group, q)
...     for start in range(0, len(k), 256):
...         scores = jit.score(group, k[start : start + 256])
...         scores[:] = cap * np.tanh(scores * (scale / cap))
...         jit.softmax(group)
...         jit.weigh_values(group, v[start : start + 256])
...     jit.finish(group, out, lse)
>>> q, k, v = (np.ones(shape, np.float32) for shape in ((2, 4), (300, 4), (300, 3)))
>>> out, lse = np.empty((2, 3), np.float32), np.empty(2, np.float32)
>>> soft_capped(jit.kernels(q.dtype), q, k, v, 0.5, 1.0, out, lse)
>>> out.tolist() == [[1.0] * 3] * 2, np.allclose(lse, np.log(300) + np.tanh(2))
(True, True)

A block that is out of turn or given another shape raises ``ValueError``. Numba drops exceptions in a ``prange``: call
``check(kernels)`` after it. The blocks are for compiled code and cannot be called from Python.
"""

from .blocks import LOG2_E, finish, mask, pack, score, softmax, weigh_values
from .lane_group import LaneGroup, lane_group
from .scalars import bfloat16, exp2, float8_e4m3fn, float8_e5m2
from .table import Kernels, check, kernels

__all__ = [
    "LOG2_E",
    "Kernels",
    "LaneGroup",
    "bfloat16",
    "check",
    "exp2",
    "finish",
    "float8_e4m3fn",
    "float8_e5m2",
    "kernels",
    "lane_group",
    "mask",
    "pack",
    "score",
    "softmax",
    "weigh_values",
]
